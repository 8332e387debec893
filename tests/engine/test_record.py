"""``kvplugins research record`` in a real engine agrees with the decode steps."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import engine_environment
from tiny_model import KV_HEADS, LAYERS

from vllm_kvplugins.engine.recorded_run import RecordedRun, read_run

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SEED, PROMPT, ANSWER, BLOCK, HEAD_DIM = 3, 900, 70, 32, 32
SINKS, WINDOW, SKIP, BUDGET = 16, 32, 1, 64
# all words of the tiny model's tokenizer
WORDS = ("Repeat", "Summarize", "the", "context", "else")


def record(
    model: str, folder: Path, max_tokens: int = ANSWER, **config: Any
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the command; returns its result and the file."""
    print("seed", SEED)
    rng = random.Random(SEED)
    prompt, out = folder / "prompt.txt", folder / "run.jsonl"
    prompt.write_text(" ".join(rng.choice(WORDS) for _ in range(PROMPT)))
    settings = {"sinks": SINKS, "window": WINDOW, "skip_layers": SKIP, **config}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "vllm_kvplugins.cli", "research", "record", model),
            *("--policy", "exact-topk", "--policy-config", json.dumps(settings)),
            *("--prompt-file", str(prompt), "--max-tokens", str(max_tokens)),
            *("--out", str(out), "--dtype", "float32"),
        ],
        env=engine_environment(VLLM_CPU_KVCACHE_SPACE=None, VLLM_LOGGING_LEVEL=None),
        capture_output=True,
        text=True,
        timeout=400,
    )
    return done, out


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory) -> RecordedRun:
    done, out = record(tiny_model, tmp_path_factory.mktemp("record"), budget=BUDGET)
    assert done.returncode == 0, done.stderr
    assert "mass covered" in done.stdout
    assert "Traceback" not in done.stderr
    return read_run(out)


def test_the_header_says_what_ran(run):
    header = run.header
    assert header.policy == "exact-topk"
    assert header.config["budget"] == BUDGET
    assert header.config["reuse_every"] == 1, "defaults too"
    assert (header.prompt_tokens, header.generated_tokens) == (PROMPT, ANSWER)
    assert (header.num_layers, header.num_kv_heads) == (LAYERS, KV_HEADS)
    assert (header.block_size, header.head_dim) == (BLOCK, HEAD_DIM)
    assert header.token_bytes == 2 * HEAD_DIM * 4


def test_every_decode_step_of_every_layer_that_retrieves_is_there(run):
    expected = [(s, layer) for s in range(ANSWER - 1) for layer in range(SKIP, LAYERS)]
    assert [(f.step, f.layer) for f in run.fetches] == expected
    assert len({f.request for f in run.fetches}) == 1
    assert {f.new_tokens for f in run.fetches} == {1}


def test_counts_are_what_the_plan_implies(run):
    first, last = run.fetches[0], run.fetches[-1]
    assert first.offloaded_tokens == KV_HEADS * (PROMPT - WINDOW - SINKS)
    assert last.offloaded_tokens > first.offloaded_tokens, "the window has aged"
    for fetch in run.fetches:
        assert fetch.hot_tokens >= KV_HEADS * BUDGET
        assert fetch.fetched_tokens <= fetch.hot_tokens
        assert fetch.copied_bytes == fetch.fetched_tokens * run.header.token_bytes
        # the best tokens of all heads cover more than as many random ones
        at_random = fetch.hot_tokens / fetch.offloaded_tokens
        assert 1.5 * at_random < fetch.mass_covered_share <= 1
    assert any(fetch.fetched_tokens for fetch in run.fetches)


def test_a_run_that_fetches_nothing_is_refused(tiny_model, tmp_path):
    done, out = record(tiny_model, tmp_path, max_tokens=4, budget=PROMPT)
    assert done.returncode == 1
    assert "fetched nothing" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()
