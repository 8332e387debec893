"""``--kv-policy auto``: chosen at start-up, with the engine that then runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from harness import run_scenario
from texts import random_tokens
from tiny_model import MLA, VOCABULARY, write_config
from typer.testing import CliRunner

from vllm_kvplugins.cli import app
from vllm_kvplugins.errors import codes_in

pytestmark = pytest.mark.engine

SEED = 41
AUTO = {"name": "auto"}
# Requests of 1024 tokens; blocks of 32. 700 blocks hold 21 of them, 70 hold two.
SMALL, LARGE = {"num_gpu_blocks_override": 70}, {"num_gpu_blocks_override": 700}
LENGTH = {"max_model_len": 1024, "max_num_seqs": 8}
SHORT = AUTO | {"answer": 64}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
# name -> kv_policy, other engine arguments
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "stock": (None, LARGE),
    "large pool": (SHORT, LARGE),
    "large pool, sessions": (SHORT | {"sessions": True}, LARGE),
    "small pool": (SHORT, SMALL),
    "small pool by name": ("auto", SMALL),
    "few requests": (SHORT | {"concurrency": 2}, SMALL),
    "short prompts": (SHORT | {"context": 128}, SMALL),
    "length of the pool": (SHORT, SMALL | {"max_model_len": -1}),
    "chat": (SHORT | {"workload": "chat"}, SMALL),
    "drafts": (SHORT, SMALL | {"speculative_config": NGRAM}),
    "host memory as set": (SHORT | {"host_memory": "1GiB"}, SMALL),
    "no host memory": (SHORT | {"host_memory": 0}, SMALL),
    "no host memory, losses": (SHORT | {"host_memory": 0, "min_score": 0}, SMALL),
    "session files": (SHORT | {"session_dir": "FOLDER"}, SMALL),
    "pipeline": (
        SHORT,
        SMALL | {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
    ),
    "MLA": (SHORT, SMALL | {"model": "mla"}),
    "nothing fits": (
        SHORT | {"host_memory": 0, "min_score": 0.99},
        {"num_gpu_blocks_override": 20},
    ),
    "setting of a policy": (SHORT | {"budget": 0.1}, SMALL),
    "several nodes": (SHORT, SMALL | {"data_parallel_size": 2} | {"nodes": 2}),
}


@pytest.fixture(scope="module")
def chosen(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("auto")
    models = {"tiny": tiny_model, "mla": str(write_config(folder / "mla", **MLA))}
    cases = {}
    for name, (policy, arguments) in CASES.items():
        arguments = LENGTH | {"block_size": 32} | arguments
        if arguments.pop("nodes", 1) > 1:
            arguments["data_parallel_size_local"] = 1
        if isinstance(policy, dict) and "session_dir" in policy:
            policy = policy | {"session_dir": str(folder / "sessions")}
        model = models[arguments.pop("model", "tiny")]
        cases[name] = arguments | {"model": model, "kv_policy": policy}
    return dict(run_scenario("scenarios_auto:choices", {"cases": cases}))


def test_a_pool_for_everything_is_left_to_stock_vllm(chosen):
    own, stock = chosen["large pool"], chosen["stock"]
    assert own["policy"] is None
    assert own["scheduler"] == stock["scheduler"]
    (message,) = own["log"]
    assert "stock vLLM" in message
    assert message.startswith("INFO")
    assert own["mine"] == 1, "the user's other settings stay"


def test_sessions_in_such_a_pool_keep_everything(chosen):
    policy = chosen["large pool, sessions"]["policy"]
    assert (policy["name"], policy["sessions"]) == ("full", True)


def test_a_small_pool_gets_the_retriever_with_the_measured_settings(chosen):
    for name in ("small pool", "small pool by name", "drafts"):
        policy = chosen[name]["policy"]
        assert policy["name"] == "icecache-means", name
        assert policy["skip_layers"] == 0
        assert 0 < policy["budget"] < 0.2
    (message,) = chosen["small pool"]["log"]
    for text in ("of 40 pass keys", "host memory", "left out", "CPU", "larger models"):
        assert text in message, text


def test_what_the_user_expects_counts(chosen):
    assert chosen["few requests"]["policy"] is None
    assert chosen["short prompts"]["policy"] is None
    assert chosen["chat"]["policy"]["sessions"] is True


def test_vllm_may_choose_the_longest_request(chosen):
    """``--max-model-len auto``: what 69 blocks hold, less an answer of 64 tokens."""
    (message,) = chosen["length of the pool"]["log"]
    assert "prompts of 2,144 tokens" in message
    assert chosen["length of the pool"]["policy"]["name"] == "icecache-means"


def test_host_memory_is_a_limit_for_the_choice_and_for_the_policy(chosen):
    assert chosen["host memory as set"]["policy"]["host_memory"] in ("1GiB", 1 << 30)
    assert chosen["no host memory"]["policy"] is None
    (message,) = chosen["no host memory"]["log"]
    assert "others wait" in message
    assert message.startswith("WARNING"), "the user asked for a policy and gets none"
    losing = chosen["no host memory, losses"]
    assert losing["policy"]["name"] == "protokv"
    (message,) = losing["log"]
    assert message.startswith("WARNING")
    assert "30% of the keys" in message


def test_what_a_policy_refuses_the_next_one_gets(chosen):
    """Retrievers keep no session files; a policy that keeps everything does."""
    case = chosen["session files"]
    assert case["policy"]["name"] == "full"
    (message,) = case["log"]
    assert message.startswith("WARNING")
    assert {"KVP035"} == set(codes_in(message))
    for name in ("icecache-means", "exact-topk"):
        assert f"cannot run here: {name}" in message


def test_without_the_compiled_extension_another_retriever_is_chosen(tiny_model):
    """The index of the best one is compiled."""
    case = LENGTH | SMALL | {"block_size": 32, "model": tiny_model, "kv_policy": SHORT}
    report = run_scenario(
        "scenarios_auto:choices", {"cases": {"torch": case}}, {"KVP_OPS": "torch"}
    )["torch"]
    assert report["policy"]["name"] == "exact-topk"
    (message,) = report["log"]
    assert message.startswith("WARNING")
    assert "cannot run here: icecache" in message


@pytest.mark.parametrize(("name", "code"), [("pipeline", "KVP022"), ("MLA", "KVP011")])
def test_what_no_policy_can_run_is_stock(chosen, name, code):
    case = chosen[name]
    assert case.get("error") is None
    assert case["policy"] is None
    (message,) = case["log"]
    assert message.startswith("WARNING")
    assert code in codes_in(message)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("nothing fits", "KVP053"),
        ("setting of a policy", "KVP051"),
        ("several nodes", "KVP055"),
    ],
)
def test_what_cannot_be_chosen_is_refused(chosen, name, code):
    assert codes_in(chosen[name]["error"]) == (code,)
    assert chosen[name]["after"]["kv_policy"]["name"] == "auto"


@pytest.mark.parametrize("name", ["large pool", "small pool", "chat", "no host memory"])
def test_the_command_line_recommends_the_same(chosen, name):
    """The log ends with a command that shows all figures of the same choice."""
    (message,) = chosen[name]["log"]
    command = shlex.split(message.rpartition("all figures: ")[2])
    assert command[0] == "kvplugins"
    done = CliRunner().invoke(app, [*command[1:], "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    policy = chosen[name]["policy"]
    assert result["policy"] == ("stock" if policy is None else policy["name"])
    for key, value in result["settings"].items():
        assert policy[key] == value


def test_processes_that_start_later_find_the_policy(tiny_model):
    """The second one would find too little host memory to choose the same."""
    flags = ["--kv-policy", "auto", "--kv-policy-config", '{"answer": 64}']
    flags += ["--max-model-len", "1024", "--max-num-seqs", "8", "--dtype", "float32"]
    flags += ["--block-size", "32", "--num-gpu-blocks-override", "70"]
    flags += ["--skip-tokenizer-init"]
    arguments = {"model": tiny_model, "flags": flags}
    first, second = run_scenario(
        "scenarios_auto:later_processes", arguments | {"host_bytes": [8 << 30, 0]}
    )
    assert first["policy"]["name"] == "icecache-means"
    assert second["policy"] == first["policy"]
    assert (len(first["log"]), second["log"]) == (1, [])
    first, second = run_scenario(
        "scenarios_auto:later_processes", arguments | {"host_bytes": [0, 8 << 30]}
    )
    assert first["policy"] is second["policy"] is None


def test_a_named_policy_is_found_by_later_processes_too(tiny_model):
    flags = ["--kv-policy", "snapkv", "--max-model-len", "1024", "--dtype", "float32"]
    arguments = {"model": tiny_model, "flags": [*flags, "--skip-tokenizer-init"]}
    first, second = run_scenario(
        "scenarios_auto:later_processes", arguments | {"host_bytes": [0, 0]}
    )
    assert first["policy"]["name"] == "snapkv"
    assert second["policy"] == first["policy"]


def test_tokens_equal_stock_where_everything_fits(tiny_model):
    print("seed", SEED)
    prompts = [random_tokens(SEED + n, n, VOCABULARY) for n in (20, 300, 900)]
    arguments = {"model": tiny_model, "prompts": prompts, "tokens": 16} | LENGTH | LARGE
    stock = run_scenario("scenarios_auto:answers", arguments | {"policy": None})
    own = run_scenario("scenarios_auto:answers", arguments | {"policy": SHORT})
    assert own == stock


def test_an_engine_with_a_small_pool_frees_blocks(tiny_model):
    print("seed", SEED)
    prompts = [random_tokens(SEED + n, 900, VOCABULARY) for n in range(4)]
    arguments = {"model": tiny_model, "prompts": prompts, "tokens": 64} | LENGTH | SMALL
    own = run_scenario("scenarios_auto:answers", arguments | {"policy": SHORT})
    assert own["policy"]["name"] == "icecache-means"
    assert own["compactions"] > 0
    assert all(len(tokens) == 64 for tokens in own["tokens"].values())


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_detail_of_a_long_text_is_found_in_a_small_pool(model_path):
    """As stock vLLM finds it, in a pool for all of the prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. "
    text = (
        f"There is important information hidden in a lot of irrelevant text. Find it.\n"
        f"{filler * 10}\nThe pass key is 72202. Remember it. 72202 is the pass key.\n"
        f"{filler * 60}\nWhat is the pass key? The pass key is"
    )
    ids = tokenizer.encode(text)
    arguments = {
        "model": model_path,
        "prompts": [list(ids)],
        "tokens": 8,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 90,
    }
    stock = run_scenario(
        "scenarios_auto:answers",
        arguments | {"policy": None, "num_gpu_blocks_override": 600},
        timeout=1000,
    )
    assert "72202" in tokenizer.decode(stock["tokens"]["0"])
    own = run_scenario(
        "scenarios_auto:answers", arguments | {"policy": SHORT}, timeout=1000
    )
    assert own["policy"]["name"] == "icecache-means"
    assert own["compactions"] > 0
    assert "72202" in tokenizer.decode(own["tokens"]["0"])
