"""EpiCache in vLLM: one cache per episode, restored exactly, without leaks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import runners
from harness import engine_environment, run_scenario
from live_server import metric, post, serving
from s3_server import BUCKET, s3_server
from texts import two_topics
from tiers import tiered
from waiting import wait_for

from vllm_kvplugins.episodes.encoder import load_encoder
from vllm_kvplugins.episodes.routing import EpisodeRouter
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.episodes.utterances import utterances_of

pytestmark = pytest.mark.engine

BLOCK = 32
POLICY: dict[str, Any] = {
    "name": "epicache",
    "budget": 192,
    "prefill_block": 128,
    "session_memory": "64MiB",
}
# the last policy has no patched prompt: its compressor scores by instruction
GUIDES = [[5, 9, 11, 300, 7], [400, 17, 23], []]
ROUTE = [2, 0, 1, 0, 0, 1]
HISTORY, TURN = 900, 65  # tokens of the first history, and of a query with its answer
# maximum of a request: its budget, a block of history, a partial block
BOUND = (192 + 128) // BLOCK + 1


@pytest.mark.proves(policy="epicache", runner="runner", asynchronous="asynchronous")
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize(
    "asynchronous", tiered([False, True], [True]), ids=["sync", "async"]
)
def test_a_restored_episode_answers_as_one_read_from_scratch(
    tiny_model, runner, asynchronous
):
    if runner == "V2":
        pytest.importorskip("triton")
    run = run_scenario(
        "scenarios_epicache:conversation",
        {"model": tiny_model, "policy": POLICY, "guides": GUIDES, "route": ROUTE},
        runners.environment(runner, asynchronous),
    )
    assert run["answers"] == run["recomputed"]
    assert len({str(answer) for answer in run["answers"]}) == len(ROUTE)
    # the first request of each episode prefills everything; later ones start at the end
    # of
    # the restored history, or at the compaction that is due since
    restored = run["restored"]
    assert restored[:3] == [0, 0, 0]
    assert restored[3] >= HISTORY + TURN
    assert restored[4] >= restored[3] + 2 * TURN - 128
    assert restored[5] >= HISTORY + 2 * TURN
    assert max(run["held"]) == BOUND
    assert run["tracked"] == 0
    assert max(run["probed"]) == 2, "requests share a probe's forward pass"


@pytest.mark.parametrize(
    "asynchronous", tiered([False, True], [True]), ids=["sync", "async"]
)
def test_a_pool_that_is_as_small_as_the_bound(tiny_model, asynchronous):
    # the null block, the request's blocks, and blocks that the step in flight still
    # holds
    blocks = 1 + BOUND + 1
    run = run_scenario(
        "scenarios_epicache:conversation",
        {"model": tiny_model, "policy": POLICY, "guides": GUIDES, "route": ROUTE}
        | {"settings": {"num_gpu_blocks_override": blocks}},
        runners.environment(runners.CHOSEN, asynchronous),
    )
    assert run["answers"] == run["recomputed"]
    # a compaction is due when the request starts from turn 2: one block more, at most
    assert run["restored"][5] == 1088
    assert max(run["held"]) == BOUND


def test_a_long_text_to_complete_runs_in_a_small_pool(tiny_model):
    """6,000 tokens without turn ends, alone and with another, in a pool of 3,800: they
    are compressed while they are read, up to their last block, and nothing leaks.
    """
    policy = POLICY | {"budget": 1024, "prefill_block": 512}
    policy |= {"longest_patched_prompt": 256}
    pools = {
        "small": 3800 // BLOCK + 1,
        "groups": [[6000], [6100, 3000]],
        "refused": (5000, 2900),
        "large": 600,
        "settings": {"skip_tokenizer_init": False, "max_model_len": 7936},
    }
    run = run_scenario(
        "scenarios_blocks:pools", {"model": tiny_model, "policy": policy, **pools}
    )
    small, large = run["small"], run["large"]
    assert max(small[0]["in_use"]) <= (1024 + 512 + 512) // BLOCK + 2
    assert small[0]["compactions"] == (6000 - 512 - 1024) // 512
    for few, many in zip(small, large, strict=True):
        assert few["tokens"] == many["tokens"]
        assert few["preemptions"] == 0


def test_a_long_tool_loop_joins_the_history_and_its_question_stays(tiny_model):
    """Restored requests equal recomputed ones, also where the loop was compressed."""
    policy = {
        "name": "epicache",
        "budget": 96,
        "prefill_block": 64,
        "loop_tokens": 150,
        "sessions": True,
    }
    report = run_scenario(
        "scenarios_flowkv:tool_loop",
        {
            "model": tiny_model,
            "policy": policy,
            "rounds": 8,
            "result": 60,
            "patched": list(range(40, 70)),
        },
    )
    requests, (_, answered, _), parts = (
        report[key] for key in ("requests", "ends", "parts")
    )
    for request in requests:
        restored, recomputed = request["answers"]
        assert restored == recomputed
        assert request["held"] == request["planned"]
    at = [cut for request in requests for cut in request["compacted_at"]]
    assert at == sorted(set(at)), "never the same twice"
    # Every third round of 64 tokens ends more than 150 tokens behind the last.
    latest = [max(request["compacted_at"], default=0) for request in requests]
    assert [number for number, cut in enumerate(latest) if cut] == [4, 7, 9]
    assert parts[3] - 64 < latest[4] <= parts[3]
    assert parts[6] - 64 < latest[7] <= parts[6]
    assert answered - 64 < latest[9] <= answered
    kept = [tokens for request in requests for tokens in request["of_question"]]
    assert kept == [min(max(cut - 150, 0), 80) for cut in at]
    # The budget, a block, the question, rounds up to the setting and the newest one.
    for request in requests:
        assert request["held"] * 32 <= 96 + 64 + 96 + 150 + 2 * 64 + 2 * 32


@pytest.mark.slow
def test_a_compiled_model_answers_as_an_eager_one(tiny_model):
    compiled, eager = (
        run_scenario(
            "scenarios_epicache:conversation",
            {"model": tiny_model, "policy": POLICY, "guides": GUIDES}
            | {"route": [0, 1, 0], "settings": {"enforce_eager": enforced}},
            {"VLLM_CPU_CI_ENV": "1"},  # graphs are traced but not compiled to C++
        )
        for enforced in (False, True)
    )
    assert compiled["answers"] == compiled["recomputed"] == eager["answers"]
    assert compiled["restored"] == eager["restored"]
    assert compiled["probed"] == eager["probed"]
    assert compiled["graphs"] > eager["graphs"] == 0


def test_chats_are_routed(model_path):
    pytest.importorskip("sentence_transformers")
    policy = POLICY | {"episodes": 2, "longest_patched_prompt": 64}
    run = run_scenario(
        "scenarios_epicache:chats", {"model": model_path, "policy": policy}
    )
    fruit, train, again, *built, last = run["patched_prompts"]
    assert "orchard" in fruit
    assert "rails" not in fruit
    assert "rails" in train
    assert "orchard" not in train
    assert again == fruit
    assert run["restored"][0] == run["restored"][1] == 0
    assert run["restored"][2] > 400
    assert {fruit, train} == set(built), "one build per episode"
    assert len(built) == 2
    assert last == train
    # all but the part after the due compaction is restored; the question is new
    assert run["restored_after"] > 400
    assert all(len(each["turn_ends"]) == 1 for each in run["parameters"])


@pytest.mark.slow  # test_clusterings.py and test_chat_clusterings.py have no engine
@pytest.mark.parametrize("place", ["session_dir", "session_url", "s3"])
def test_an_episode_is_restored_after_a_restart(model_path, tmp_path, place):
    """With its clustering, although the conversation has grown since."""
    pytest.importorskip("sentence_transformers")
    with s3_server() if place == "s3" else nullcontext():
        url = f"s3://{BUCKET}/x" if place == "s3" else f"file://{tmp_path}"
        restart_between_turns(model_path, tmp_path, place, url)


def restart_between_turns(model_path, tmp_path, place, url):
    folder = (
        {"session_dir": str(tmp_path)}
        if place == "session_dir"
        else {"session_url": url, "session_lookup_s": 30, "session_load_s": 60}
    )
    # The history grows by a topic, which would be an episode of its own.
    episodes: dict[str, Any] = {"episodes": 2, "recluster_growth": 4}
    arguments: dict[str, Any] = {
        "model": model_path,
        "policy": POLICY | folder | episodes | {"longest_patched_prompt": 64},
        "folder": url,
    }
    fruit = "Which fruit ripens in the orchard?"
    first = run_scenario(
        "scenarios_epicache:part_of_a_chat",
        arguments | {"messages": None, "queries": [fruit]},
    )
    text = "violins, cellos and flutes play in the concert hall every evening"
    added = [
        {"role": role, "content": f"{text}, number {number}"}
        for number in range(10)
        for role in ("user", "assistant")
    ]
    longer = [*first["messages"], *added]
    second = run_scenario(
        "scenarios_epicache:part_of_a_chat",
        arguments
        | {"messages": longer, "queries": [fruit] * 2}
        | {"drops": place == "session_dir"},
    )
    assert second["patched"] == first["patched"] * 2
    assert first["restored"] == [0]
    assert second["restored"][0] > 400, "what the engine before the restart has stored"
    assert second["counts"]["failures"] == 0
    assert second["tracked"] == 0
    assert first["files"] == [1]
    assert second["files"] == ([1, 0] if place == "session_dir" else [1])
    guides = [
        EpisodeRouter(EpisodeSettings(**episodes), load_encoder).route("", texts, fruit)
        for texts in map(utterances_of, (first["messages"][:-2], longer))
    ]
    assert guides[0].guide != guides[1].guide, "clustered anew, it would not be found"


@pytest.mark.slow
def test_a_server_that_idles_builds_the_other_episodes(model_path):
    policy = POLICY | {"episodes": 2, "longest_patched_prompt": 64}
    run = run_scenario(
        "scenarios_epicache:served",
        {"model": model_path, "policy": policy},
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    (_, first), (tokens, second) = run["answers"]
    assert first == 0
    assert second > tokens - 150, "the other episode was there when it was asked for"


# -- live servers ----------------------------------------------------------------------

LIVE: dict[str, Any] = {
    "budget": 192,
    "prefill_block": 128,
    "episodes": 2,
    "recluster_growth": 4,
    "longest_patched_prompt": 64,
    "build": "never",
}
FRUIT = "Which fruit ripens in the orchard?"
TRAIN = "When do the trains leave for the mountains?"


def options(**settings: Any) -> tuple[str, ...]:
    """Of a server whose chats have two episodes."""
    policy = json.dumps(LIVE | settings)
    return (
        *("--dtype", "float32", "--block-size", "32", "--max-model-len", "4096"),
        *("--num-gpu-blocks-override", "200"),
        *("--kv-policy", "epicache", "--kv-policy-config", policy),
    )


def third_topic() -> list[dict[str, str]]:
    """Clustered with these messages, a chat would have other episodes."""
    text = "violins, cellos and flutes play in the concert hall every evening"
    return [
        {"role": role, "content": f"{text}, number {number}"}
        for number in range(10)
        for role in ("user", "assistant")
    ]


@pytest.mark.slow
def test_two_api_servers_send_a_question_to_the_same_episode(model_path, tmp_path):
    """The second one meets the conversation after it has grown."""
    pytest.importorskip("sentence_transformers")
    store = tmp_path / "sessions"
    settings = {"session_memory": "64MiB", "session_dir": str(store)}
    environment = engine_environment(
        VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_LOGGING_LEVEL="DEBUG"
    )
    start = (sys.executable, model_path, tmp_path, *options(**settings))
    start += ("--api-server-count", "2")
    with serving(*start, start_s=500, **environment) as base:

        def ask(messages: list[dict[str, str]], **more: Any) -> dict[str, str]:
            chat = "/v1/chat/completions"
            answer = post(base, chat, messages=messages, max_tokens=8, **more)
            return answer["choices"][0]["message"]

        def files(ending: str) -> int:
            return len(list(store.glob(f"*/*{ending}.safetensors")))

        question = {"role": "user", "content": FRUIT}
        messages = [*two_topics(), question]
        for _ in range(6):  # by both, so that neither writes
            ask(messages, vllm_xargs={"kv_session": False}, cache_salt="other")
        assert (files(".clustering"), files(".r0of1")) == (0, 0)
        messages.append(ask(messages))
        messages += third_topic()
        turns = 8
        for _ in range(turns):  # each in a connection of its own
            messages.append(question)
            messages.append(ask(messages))
        (log,) = tmp_path.glob("server-*.log")
        assert "found: True" in log.read_text(), "one server got all requests"
        hits, misses = (
            metric(base, f"vllm:kv_policy_session_{name}_total")
            for name in ("hits", "misses")
        )
        assert files(".clustering") == 1
        assert (hits, misses) == (turns, 1)
        found, saved, failures = (
            metric(base, f"vllm:kv_policy_clusterings_{name}_total")
            for name in ("found", "saved", "failures")
        )
        assert found >= 1, "counted in any of the two API servers"
        assert (saved, failures) == (1, 0)


# A question of each topic goes to each engine, then the next two, and so on.
ASKED = [FRUIT, FRUIT, TRAIN, TRAIN] * 3
ENGINES = [0, 1] * 6


def asked(
    base: str, engines: list[int] | list[None], is_saved: Callable[[int], bool]
) -> dict[str, list[Any]]:
    """A conversation, in which a topic joins the first two.

    Args:
        engines: where each turn is sent; None: there is only one.
        is_saved: whether an engine that looks now finds so many turns.

    Returns:
        Per turn, token IDs of the answer and the report; log-probabilities of all
        tokens.
    """
    messages = two_topics()
    answers: dict[str, list[Any]] = {"tokens": [], "logprobs": [], "reports": []}
    for question, engine in zip(ASKED, engines, strict=True):
        messages.append({"role": "user", "content": question})
        answer = post(
            base,
            "/v1/chat/completions",
            {} if engine is None else {"X-data-parallel-rank": str(engine)},
            messages=messages,
            max_tokens=8,
            ignore_eos=True,
            logprobs=True,
            return_token_ids=True,
            vllm_xargs={"kv_report": True},
        )
        choice, report = answer["choices"][0], answer["kv_transfer_params"]
        answers["tokens"].append(choice["token_ids"])
        answers["logprobs"] += [t["logprob"] for t in choice["logprobs"]["content"]]
        answers["reports"].append(report["kv_policy"])
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
        turns = len(answers["reports"])
        if turns == 1:
            messages += third_topic()
        # People read an answer before they reply, so it is saved by then.
        wait_for(lambda n=turns: is_saved(n), 60)
    return answers


@pytest.fixture(scope="module")
def computed(model_path, tmp_path_factory):
    """Answers of a server with one engine, which computes every history."""
    pytest.importorskip("sentence_transformers")
    folder = tmp_path_factory.mktemp("alone")
    environment = engine_environment(VLLM_ENABLE_V1_MULTIPROCESSING="1")
    start = (sys.executable, model_path, folder, *options(sessions=False))
    with serving(*start, start_s=500, **environment) as base:
        answers = asked(base, [None] * len(ASKED), lambda turns: True)
    assert not any(report["session_tokens"] for report in answers["reports"])
    return answers


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("place", "api_servers"),
    [("session_url", 1), ("session_url", 2), ("session_dir", 2)],
)
def test_engines_of_one_server_answer_from_the_same_episodes(
    model_path, tmp_path, computed, place, api_servers
):
    """Each turn goes to the engine that did not get the last one."""
    store = tmp_path / "sessions"
    if place == "session_url":
        settings = {"session_url": f"file://{store}", "session_refresh_s": None}
        settings |= {"session_lookup_s": 30, "session_load_s": 60}
    else:
        settings = {"session_dir": str(store)}
    environment = engine_environment(
        VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_LOGGING_LEVEL="DEBUG"
    )
    start = (sys.executable, model_path, tmp_path)
    start += options(session_memory="64MiB", **settings)
    start += ("--data-parallel-size", "2", "--api-server-count", str(api_servers))

    def files(ending: str) -> int:
        return len(list(store.glob(f"*/*{ending}.safetensors")))

    # Up to six processes start, one after the other.
    with serving(*start, start_s=600, **environment) as base:
        answers = asked(base, ENGINES, lambda turns: files(".r0of1") == turns)
        counts = {
            name: metric(base, f"vllm:kv_policy_{name}_total")
            for name in (
                *("session_hits", "session_misses", "session_store_hits"),
                *("session_failures", "session_store_failures"),
                *("clusterings_saved", "clusterings_failures"),
            )
        }
    assert answers["tokens"] == computed["tokens"]
    # Another episode may prefer the same tokens, but not as strongly.
    assert answers["logprobs"] == pytest.approx(computed["logprobs"], abs=1e-3)
    reports = answers["reports"]
    episodes = [report["episode"] for report in reports]
    assert episodes == [report["episode"] for report in computed["reports"]]
    assert episodes[:4] * 3 == episodes
    assert episodes[0] == episodes[1] != episodes[2] == episodes[3]
    assert all(2 * r["held_blocks"] < r["stock_blocks"] for r in reports)
    # Of each episode, the first question to anyone, or to each engine, is a miss.
    misses = [0, 2] if place == "session_url" else [0, 1, 2, 3]
    restored = [report["session_tokens"] for report in reports]
    assert [turn for turn, tokens in enumerate(restored) if not tokens] == misses
    assert min(tokens for tokens in restored if tokens) > 400
    hits = len(ASKED) - len(misses)
    assert counts == {
        "session_hits": hits,
        "session_misses": len(misses),
        "session_store_hits": hits if place == "session_url" else 0,
        "session_failures": 0,
        "session_store_failures": 0,
        "clusterings_saved": 1,
        "clusterings_failures": 0,
    }
    assert files(".clustering") == 1
    (log,) = tmp_path.glob("server-*.log")
    found = "found: True" in log.read_text()
    assert found == (api_servers == 2), "with two, one server got all requests"
