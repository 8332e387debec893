"""``kvplugins explain`` on a real model: its output agrees with the plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import engine_environment
from texts import english

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import ResidencyPlan

pytestmark = [pytest.mark.engine, pytest.mark.slow]
SEED = 11
WINDOW, BUDGET, BLOCK = 32, 160, 32
ALLOCATORS = ("uniform", "cross-layer")


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_kvplugins.cli", *arguments],
        env=engine_environment(VLLM_CPU_KVCACHE_SPACE=None, VLLM_LOGGING_LEVEL=None),
        capture_output=True,
        text=True,
        timeout=400,
    )


def explain_arguments(model: str, prompt: Path, out: Path, **config: Any) -> list[str]:
    return [
        *("explain", model, "--policy", "snapkv", "--dtype", "float32"),
        *("--policy-config", json.dumps(config)),
        *("--prompt-file", str(prompt), "--json", str(out)),
    ]


@pytest.fixture(scope="module")
def prompt(tmp_path_factory) -> Path:
    print("seed", SEED)
    path = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    path.write_text(english(SEED, 36) + "\nEnd.")
    return path


@pytest.fixture(scope="module")
def documents(model_path, prompt, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """The command's document for each allocator; the engine runs twice."""
    folder = tmp_path_factory.mktemp("explain")
    pages = {}
    for allocator in ALLOCATORS:
        out, page = folder / f"{allocator}.json", folder / f"{allocator}.html"
        config = {"budget": BUDGET, "window": WINDOW, "allocator": allocator}
        arguments = explain_arguments(model_path, prompt, out, **config)
        done = run_cli(*arguments, "--html", str(page))
        assert done.returncode == 0, done.stderr
        assert "kept per head" in done.stdout
        assert "Traceback" not in done.stderr
        assert "INFO" not in done.stderr, "vLLM's log is hidden without --verbose"
        pages[allocator] = json.loads(out.read_text(encoding="utf-8"))
        assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    return pages


def heads_of(document: dict[str, Any]) -> list[list[int]]:
    layers = document["layers"]
    return [h["kept_positions"] for layer in layers for h in layer["kv_heads"]]


def plan_of(document: dict[str, Any]) -> ResidencyPlan:
    policy = parse_policy({"name": document["policy"], **document["config"]})
    tokens = len(document["prompt_token_ids"])
    # a budget in tokens does not depend on the bytes of the cache
    return policy.plan(Lengths(tokens), Geometry(BLOCK, 1, 1, 1))


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_positions_are_ascending_and_within_the_prompt(documents, allocator):
    document = documents[allocator]
    tokens = len(document["prompt_token_ids"])
    assert len(document["tokens"]) == tokens > BUDGET
    for kept in heads_of(document):
        assert kept == sorted(set(kept))
        assert kept[0] >= 0
        assert kept[-1] == tokens - 1, "the newest token always stays"


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_the_window_and_the_tail_stay_everywhere(documents, allocator):
    document = documents[allocator]
    tokens = len(document["prompt_token_ids"])
    assert tokens % BLOCK, "the prompt should end inside a block"
    stays = set(range(tokens - max(WINDOW, tokens % BLOCK), tokens))
    assert all(stays <= set(kept) for kept in heads_of(document))


def test_counts_are_what_the_plan_implies(documents):
    for allocator, document in documents.items():
        tokens = len(document["prompt_token_ids"])
        (compaction,) = plan_of(document).compactions
        tail = tokens - compaction.retained.stop * BLOCK
        counts = [len(kept) for kept in heads_of(document)]
        average = len(compaction.retained) * BLOCK + tail
        assert sum(counts) == average * len(counts), "the pages are shared exactly"
        assert all((count - tail) % BLOCK == 0 for count in counts), "whole pages"
        if allocator == "uniform":
            assert set(counts) == {average}
        else:
            assert len(set(counts)) > 1, "this allocator shares unevenly"


def test_both_allocators_keep_equally_many_of_the_same_prompt(documents):
    uniform, crossed = (documents[name] for name in ALLOCATORS)
    assert uniform["prompt_token_ids"] == crossed["prompt_token_ids"]
    assert uniform["tokens"] == crossed["tokens"]
    totals = [sum(map(len, heads_of(d))) for d in (uniform, crossed)]
    assert totals[0] == totals[1] > 0
    assert heads_of(uniform) != heads_of(crossed)


def test_tokens_are_the_prompt_read_piece_by_piece(documents, prompt):
    assert "".join(documents["uniform"]["tokens"]) == prompt.read_text()


def test_a_chat_is_compressed_by_its_turns(model_path, tmp_path):
    """FlowKV keeps the open question, and a share of the finished turn."""
    turn = [
        {"role": "user", "content": english(SEED, 30)},
        {"role": "assistant", "content": "I have read it."},
    ]
    question = {"role": "user", "content": english(SEED + 1, 3)}
    chat, out = tmp_path / "chat.json", tmp_path / "chat_kept.json"
    chat.write_text(json.dumps({"messages": [*turn, question]}))
    done = run_cli(
        *("explain", model_path, "--policy", "flowkv", "--dtype", "float32"),
        *("--policy-config", '{"ratio": 0.3}', "--chat", str(chat), "--json", str(out)),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text(encoding="utf-8"))
    text = "".join(document["tokens"])
    assert text.count("<|im_start|>") == len([*turn, question]) + 2  # system, answer
    tokens = len(document["tokens"])
    starts = [i for i, each in enumerate(document["tokens"]) if each == "<|im_start|>"]
    finished = starts[-2]
    for kept in heads_of(document):
        assert set(range(finished, tokens)) <= set(kept)
        of_turn = sum(position < finished for position in kept)
        assert 0.2 * finished < of_turn < 0.3 * finished + 2 * BLOCK


def test_without_a_compaction_everything_is_kept(model_path, prompt, tmp_path):
    out = tmp_path / "all.json"
    done = run_cli(*explain_arguments(model_path, prompt, out, budget=1.0))
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text(encoding="utf-8"))
    assert plan_of(document).compactions == ()
    everything = list(range(len(document["prompt_token_ids"])))
    assert all(kept == everything for kept in heads_of(document))


def test_a_prompt_beyond_the_context_is_refused(model_path, prompt, tmp_path):
    out = tmp_path / "none.json"
    arguments = explain_arguments(model_path, prompt, out, budget=BUDGET)
    done = run_cli(*arguments, "--max-model-len", "256")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "[KVP509]" in done.stderr
    assert not out.exists()
