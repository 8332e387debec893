"""Sessions in a real engine: answers equal those of one long request."""

from __future__ import annotations

import statistics

import pytest
import runners
from draft_models import drafter
from harness import run_scenario

from vllm_kvplugins.sessions.inspection import list_files, open_folders

pytestmark = pytest.mark.engine

# over SnapKV, whose window of 64 tokens is two blocks
FLOW = {"name": "flowkv", "ratio": 0.3}
QUESTIONS = [300, 90, 400, 60, 33]


def talks(model, policy, **arguments):
    arguments = {"questions": QUESTIONS, "number": 6} | arguments
    return run_scenario(
        "scenarios_sessions:talks", {"model": model, "policy": policy} | arguments
    )


@pytest.fixture(scope="module")
def recomputed(tiny_model):
    """Every request computes its whole history."""
    settings = {"num_gpu_blocks_override": 400, "enable_prefix_caching": False}
    return talks(tiny_model, FLOW | {"sessions": False}, settings=settings)


def computed(report, questions):
    """Prompt tokens that were computed beyond the new question, per request."""
    return [
        prompt - hit - question
        for question, prompts, hits in zip(
            questions, report["prompts"], report["cached"], strict=True
        )
        for prompt, hit in zip(prompts, hits, strict=True)
    ]


def test_a_conversation_equals_one_long_request(tiny_model, recomputed):
    kept = talks(tiny_model, FLOW)
    assert kept["answers"] == recomputed["answers"]
    assert kept["counts"]["hits"] == 6 * (len(QUESTIONS) - 1)
    assert kept["counts"]["misses"] == 6
    # nothing is computed again, not even the last answer's window: only its last token
    # remains to be computed
    assert max(computed(kept, QUESTIONS)[6:]) <= 1
    assert not any(hit for hits in recomputed["cached"] for hit in hits)
    assert kept["tracked"] == 0


def test_in_a_small_pool_and_little_memory(tiny_model, recomputed, tmp_path):
    """Preempted requests continue their session again; other sessions come from
    disk.
    """
    settings = {
        "num_gpu_blocks_override": 40,
        "max_model_len": 1150,
        "async_scheduling": False,
    }
    policy = FLOW | {"session_dir": str(tmp_path), "session_memory": "2MiB"}
    kept = talks(tiny_model, policy, settings=settings)
    assert kept["answers"] == recomputed["answers"]
    assert kept["counts"]["evictions"] > 0, "too much memory for a test of it"
    assert kept["counts"]["hits"] >= 6 * (len(QUESTIONS) - 1)
    assert kept["counts"]["failures"] == 0
    assert kept["preemptions"] > 0, "too large a pool for a test of it"
    # where a session could not be saved, an earlier one of the same conversation serves
    assert statistics.median(computed(kept, QUESTIONS)[6:]) <= 1
    assert kept["tracked"] == 0


def talks_copied(model, scenario, blocks, ahead):
    """Some requests wait until others have ended, in a small pool."""
    settings = {
        "num_gpu_blocks_override": blocks,
        "async_scheduling": ahead,
        "max_model_len": 1150,
    }
    arguments = {"model": model, "policy": FLOW, "settings": settings}
    return run_scenario(
        f"scenarios_session_copies:{scenario}",
        arguments | {"questions": QUESTIONS, "number": 6},
    )


def check_copied(kept, recomputed):
    assert kept["answers"] == recomputed["answers"]
    assert kept["counts"]["hits"] >= 6 * (len(QUESTIONS) - 1)
    assert kept["counts"]["failures"] == 0
    assert kept["tracked"] == 0


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_sessions_are_copied_while_others_compute(tiny_model, recomputed, ahead):
    """Nobody gets the blocks of an ended request before they are copied."""
    kept = talks_copied(tiny_model, "talks_saved_slowly", 60, ahead)
    check_copied(kept, recomputed)
    assert kept["most_saving"] > 0, "no step has computed meanwhile"


@pytest.mark.parametrize("has_command", [False, True], ids=["before", "copying"])
def test_a_reset_of_the_prefix_cache_drops_a_session_that_is_saved(
    tiny_model, has_command
):
    """vLLM resets only if all blocks are free, as after an update of the weights."""
    report = run_scenario(
        "scenarios_session_copies:reset_while_saving",
        {"model": tiny_model, "policy": FLOW, "has_command": has_command},
    )
    assert report["saving"] == 1
    assert report["was_reset"]
    assert report["known"] == report["restored"] == 0
    assert report["tokens"] == report["alone"]
    assert report["failures"] == 0
    assert report["tracked"] == 0


@pytest.mark.parametrize("blocks", [400, 60], ids=["roomy", "small"])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_sessions_are_restored_while_others_compute(
    tiny_model, recomputed, blocks, ahead
):
    """In a small pool, blocks may be lost again before the request starts."""
    kept = talks_copied(tiny_model, "talks_placed", blocks, ahead)
    check_copied(kept, recomputed)
    assert kept["counts"]["device_hits"] == 0, "they were copied"
    if blocks == 400:
        assert kept["in_place"] >= 5 * (len(QUESTIONS) - 1)
        assert kept["meanwhile"] > 0, "no step has computed meanwhile"


def test_after_a_restart(tiny_model, recomputed, tmp_path):
    policy = FLOW | {"session_dir": str(tmp_path)}
    before = talks(tiny_model, policy, questions=QUESTIONS[:3])
    folders = open_folders(str(tmp_path))
    files = list_files(folders)
    assert len(files) == 18
    # The first turn of a conversation, which its later turns need.
    first = min(files, key=lambda file: (bool(file.sources), file.tokens))
    (damaged,) = tmp_path.glob(f"*/{first.name}")
    damaged.write_bytes(b"something else")
    (damaged.parent / "foreign.r0of1.safetensors").write_bytes(b"x" * 100)
    after = talks(
        tiny_model, policy, questions=QUESTIONS[3:], histories=before["histories"]
    )
    joined = [a + b for a, b in zip(before["answers"], after["answers"], strict=True)]
    assert joined == recomputed["answers"]
    again = sorted(computed(after, QUESTIONS[3:]))
    assert again[-1] > 100, "its conversation is computed again"
    assert again[-2] <= 1, "the files lack queries"
    assert (after["counts"]["hits"], after["counts"]["misses"]) == (11, 1)
    assert after["counts"]["failures"] == 0, "found at the scan of the directory"


def test_edits_aborts_and_branches_of_conversations(tiny_model):
    report = run_scenario(
        "scenarios_sessions:odds", {"model": tiny_model, "policy": FLOW}
    )
    for what in ("continued", "edited", "sibling", "left", "declined", "cached"):
        assert report[what][0] == report[what][1], what
    assert report["restored"] >= 429
    assert report["mallory"] == 0, "read another owner's session"
    assert 400 <= report["edited_restored"] <= 439
    assert report["sibling_restored"] > 500
    # the whole partial answer, although the session has some more tokens
    assert report["left_restored"] == 520 + 35
    assert report["declined_changes"] == [False, False]
    # a part of its window came from the prefix cache, which has no queries
    assert report["hit_restored"] == 0
    assert report["cached_restored"] == 219 - 64
    for restored, recomputed in report["twins"]:
        assert restored == recomputed
    assert min(report["twins_restored"]) > 500
    assert report["tracked"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_earlier_turns_need_little_memory_and_can_be_continued(tiny_model, dtype):
    """Memory has of each what the next turn has dropped."""
    report = run_scenario(
        "scenarios_sessions:earlier_turns",
        {"model": tiny_model, "policy": FLOW, "settings": {"dtype": dtype}},
    )
    assert report["reduced"] == 4
    assert report["held_bytes"] < 0.7 * report["whole_bytes"]
    for answer, recomputed, missing in report["edits"]:
        assert missing <= 1, "only the last token of an answer has no cache"
        assert dtype != "float32" or answer == recomputed
    assert report["counts"]["failures"] == 0


def test_damaged_files_trigger_recomputation_only(tiny_model, tmp_path):
    report = run_scenario(
        "scenarios_sessions:faults",
        {"model": tiny_model, "policy": FLOW, "folder": str(tmp_path)},
    )
    assert report["files"] == 5, "one was not written: the disk was full"
    assert all(equal for equal, _ in report["later"])
    restored = [restored for _, restored in report["later"]]
    assert restored[:3] == [0, 0, 0], "loaded a damaged file"
    assert min(restored[3:5]) >= 390
    assert report["counts"]["failures"] == 4  # a write and three reads
    assert report["tracked"] == 0


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("policy", "after"),
    [
        (FLOW, 0),
        (FLOW, 1),
        ({"name": "full", "sessions": True}, 0),
        ({"name": "icecache", "budget": 64, "skip_layers": 1, "sessions": True}, 0),
    ],
    ids=["nothing", "a-part", "whole", "retrieval"],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_a_failed_load_triggers_recomputation(tiny_model, policy, after, ahead):
    """The engine keeps running, and other requests are not affected."""
    report = run_scenario(
        "scenarios_sessions:failed_loads",
        {
            "model": tiny_model,
            "policy": policy | {"session_keep_on_device": False},
            "settings": {},
            "after": after,
        },
        runners.environment("V1", asynchronous=ahead),
    )
    assert report["ahead"] == ahead
    assert report["equal"] == [True, True, True]
    assert report["preemptions"] >= 1
    assert report["counts"]["failures"] >= 1
    assert report["tracked"] == 0


def test_other_policies_continue_sessions(tiny_model):
    policies = [
        {"name": "snapkv", "budget": 100, "window": 16, "sessions": True},
        {"name": "h2o", "budget": 100, "sessions": True},
    ]
    report = run_scenario(
        "scenarios_sessions:resident_or_restored",
        {
            "model": tiny_model,
            "policies": policies,
            "prompt": 325,
            "first": 10,
            "more": 15,
        },
    )
    for each in report:
        assert each["parts"] == each["whole"]
        assert each["restored"] >= 330
        assert each["warm"] == each["cold"]


def test_a_retrievers_tokens_stay_on_the_host(tiny_model):
    """Sessions move to the request that continues them; requests that need their host
    memory evict them."""
    policy = {
        "name": "icecache",
        "budget": 64,
        "skip_layers": 1,
        "host_memory": "2500KiB",
    }
    report = run_scenario(
        "scenarios_sessions:retrieved",
        {"model": tiny_model, "policy": policy | {"sessions": True}},
    )
    assert all(hit >= 400 for hits in report["restored"][1:] for hit in hits)
    assert report["counts"]["hits"] == 6
    assert report["counts"]["failures"] == 0
    assert report["held"] > 0, "sessions count against host_memory"
    assert report["counts"]["evictions"] > 0, "sessions did not give way"
    assert len(report["large"]) == 8
    assert report["tracked"] == 0


RETRIEVE = {"budget": 64, "skip_layers": 1, "sessions": True}
# Indices of these depend on how many keys arrive at once. After a rewind they are often
# built from all keys, as without a session, and not from the first prompt's.
LEARNING = "pqcache", "clusterkv", "dci"
EXACT = [
    {"name": "icecache"},
    {"name": "quest"},
    {"name": "pqcache"},
    {"name": "icecache", "index": "dci"},
]
MORE_EXACT = [
    {"name": "icecache", "index": "device", "host_memory": "64MiB"},
    {"name": "icecache", "fetch": "pages"},
    {"name": "exact-topk"},
    {"name": "arkvale"},
    {"name": "clusterkv"},
    {"name": "omnikv", "reuse_every": 2},
    {"name": "icecache", "prefill_block": 128},
]


def rewound(model, policies, number, **settings):
    return run_scenario(
        "scenarios_sessions:rewound",
        {
            "model": model,
            "policies": [RETRIEVE | policy for policy in policies],
            "number": number,
            "settings": settings,
        },
        timeout=580,
    )


@pytest.mark.parametrize(
    ("policies", "number"),
    [
        pytest.param(EXACT[:1], 1, id="one"),
        pytest.param(EXACT, 6, id="six", marks=pytest.mark.slow),
        pytest.param(MORE_EXACT, 2, id="others", marks=pytest.mark.slow),
    ],
)
def test_a_retriever_goes_back_to_any_token(tiny_model, policies, number):
    """Answers equal those of engines that compute the tokens again, and other branches
    stay."""
    for report in rewound(tiny_model, policies, number):
        policy = report["policy"]
        names = ["regenerate", "early", "late", "third"]
        if {policy["name"], policy.get("index")} & set(LEARNING):
            names = names[:2]
        if "prefill_block" in policy:
            names = names[:1]  # the rest is compacted at other tokens
        for name in names:
            got, same = report[name]
            assert got == same, (name, policy)
        check_rewinds(report, number)


@pytest.mark.slow
def test_quantized_host_memory_goes_back_to_any_token(tiny_model):
    """Tokens that return to the device were quantized, so answers may differ."""
    policy = {"name": "icecache", "host_dtype": "int8"}
    (report,) = rewound(tiny_model, [policy], 2)
    check_rewinds(report, 2)


@pytest.mark.slow
def test_with_a_drafter_that_has_a_cache_sessions_do_not_go_back(tiny_model):
    """Its layers have lost what the last compaction dropped."""
    (report,) = rewound(
        tiny_model, [{"name": "icecache"}], 1, speculative_config=drafter(tiny_model)
    )
    for name in ("regenerate", "early", "late", "third"):
        got, same = report[name]
        assert got == same, name
    assert {each["rewinds"] for each in report["changes"].values()} == {0}
    assert report["tracked"] == report["reserved"] == report["host_pages"] == 0


def check_rewinds(report, number):
    """Which requests continued a session, and that nothing is left of them."""
    changes = report["changes"]
    for name, hits, least in (
        ("regenerate us", 1, 439),
        ("second us", 1, 440 + 20),
        ("edit late us", 1, 440 + 20),
        ("edit early us", 1, 260),
        ("third us", 1, 440 + 21 + 50 + 20),
        ("first new", 0, 0),
    ):
        assert changes[name]["hits"] == hits * number, name
        assert changes[name]["least"] >= least, name
        assert changes[name]["cut_off"] == changes[name]["failures"] == 0
    for name in ("regenerate us", "edit early us", "edit late us"):
        assert changes[name]["rewinds"] == number, name
    assert report["tracked"] == report["reserved"] == report["host_pages"] == 0


def test_a_branch_is_cut_off_where_host_memory_is_full(tiny_model):
    """The request takes the session over, and the part behind its text is lost."""
    policy = {"name": "icecache", "host_memory": "400KiB"} | RETRIEVE
    report = run_scenario(
        "scenarios_sessions:cut_off", {"model": tiny_model, "policy": policy}
    )
    assert report["again"] == report["first"]
    assert report["restored"] == 439
    assert report["counts"]["cut_off"] == report["counts"]["rewinds"] == 1
    assert report["counts"]["evictions"] == 0
    assert report["sessions"] == 1, "the session is still known"
    assert report["tracked"] == report["reserved"] == report["host_pages"] == 0


# Bytes of a key or value of 32 elements, by the dtype of the cache and session_dtype.
ROW_BYTES = {
    "float32": {"auto": 128, "int8": 36, "int4": 20},
    "bfloat16": {"auto": 64, "int8": 36, "int4": 20},
}


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(FLOW, marks=pytest.mark.slow),
        pytest.param({"name": "full"}, marks=pytest.mark.slow),
        {"name": "snapkv", "budget": 128, "window": 32},
        {"name": "icecache", "budget": 64, "skip_layers": 1},
    ],
    ids=lambda policy: policy["name"],
)
def test_quantized_sessions_take_fewer_bytes_by_the_metric(
    tiny_model, policy, tmp_path
):
    """The next turn restores as many tokens as from an exact session, and files shrink
    as memory does."""
    shared = policy | {"sessions": True, "session_keep_on_device": False}
    has_files = policy["name"] != "icecache"
    policies = [
        shared
        | {"session_dtype": dtype}
        | ({"session_dir": str(tmp_path / dtype)} if has_files else {})
        for dtype in ("auto", "int8", "int4")
    ]
    exact, int8, int4 = report = stored(tiny_model, policies)
    for each in report:
        # the host tier of a retriever moves and is no part of what is copied
        assert (each["bytes"] == each["held"]) == has_files
        assert each["restored"] == exact["restored"] > 500
        assert each["tracked"] == 0
    if policy["name"] != "icecache":
        sizes = ROW_BYTES["float32"]
        assert int8["bytes"] * sizes["auto"] == exact["bytes"] * sizes["int8"]
        less = [exact["bytes"] - each["bytes"] for each in report]
        fewer = [exact["file_bytes"] - each["file_bytes"] for each in report]
        assert fewer == pytest.approx(less, abs=600)
    if policy["name"] == "full":  # it stores no queries, which are never in 4 bits
        assert int4["bytes"] * sizes["auto"] == exact["bytes"] * sizes["int4"]
    assert int4["bytes"] < int8["bytes"] < exact["bytes"]


def stored(model, policies, **settings):
    arguments = {"prompt": 700, "question": 60, "settings": settings}
    return run_scenario(
        "scenarios_sessions:stored",
        {"model": model, "policies": policies} | arguments,
        timeout=580,
    )


def test_a_bfloat16_session_takes_half_and_a_third(tiny_model):
    """36 and 20 bytes of 64: with heads of 64 or more channels it is 53 and 31 %."""
    policies = [
        {"name": "full", "session_dtype": dtype, "session_keep_on_device": False}
        for dtype in ("int8", "int4")
    ]
    exact = {"name": "full", "sessions": True, "session_keep_on_device": False}
    report = stored(tiny_model, [exact, *policies], dtype="bfloat16")
    sizes = ROW_BYTES["bfloat16"]
    for each, name in zip(report, sizes, strict=True):
        assert each["bytes"] * sizes["auto"] == report[0]["bytes"] * sizes[name]
        assert each["restored"] == report[0]["restored"]


@pytest.mark.slow
def test_quantized_files_serve_servers_of_their_dtype(tiny_model, tmp_path):
    """A restart restores the same values from files; another dtype finds nothing."""
    policy = FLOW | {"session_dtype": "int8", "session_keep_on_device": False}
    whole = talks(tiny_model, policy, questions=QUESTIONS[:4], number=3)
    files = policy | {"session_dir": str(tmp_path)}
    before = talks(tiny_model, files, questions=QUESTIONS[:3], number=3)
    more = {"questions": QUESTIONS[3:4], "number": 3}
    more["histories"] = before["histories"]
    after = talks(tiny_model, files, **more)
    joined = [a + b for a, b in zip(before["answers"], after["answers"], strict=True)]
    assert joined == whole["answers"]
    assert after["counts"]["hits"] == 3
    assert after["counts"]["failures"] == 0
    other = talks(tiny_model, files | {"session_dtype": "int4"}, **more)
    assert (other["counts"]["hits"], other["counts"]["misses"]) == (0, 3)
    assert other["counts"]["failures"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_an_idle_server_drops_sessions_by_age(tiny_model, tmp_path, ahead):
    """Memory and files, without a request or any other message."""
    run = run_scenario(
        "scenarios_sessions:expires_while_idle",
        {
            "model": tiny_model,
            "policy": FLOW
            | {"session_dir": str(tmp_path / "sessions"), "session_max_age_s": 2},
            "settings": {},
        },
        runners.environment("V1", asynchronous=ahead)
        | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    assert run["client"] == "SyncMPClient"
    assert run["ahead"] == ahead
    assert run["files"] == 1
    assert run["seconds"] < 20
    assert run["held"] == [[0, 0]]
