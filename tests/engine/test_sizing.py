"""``kvplugins size`` agrees with vLLM's block pool."""

from __future__ import annotations

from typing import Any

import pytest
from harness import run_scenario

from vllm_kvplugins.cli.size import sizing

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT, ANSWER = 2900, 70  # of scenarios_tiny.observe_reclaim
FOLDING = {"name": "snapkv", "budget": 512, "decode_budget": 512, "fold_blocks": 1}


def computed(model: str, config: str, **lengths: Any) -> dict[str, Any]:
    settings = {"dtype": "float32", "block_size": 32, "pool_bytes": None}
    settings["prefill_chunk"] = 2048
    return sizing(model, "snapkv", config, **(settings | lengths))


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        ({"name": "snapkv", "budget": 512}, '{"budget": 512}'),
        (FOLDING, '{"budget": 512, "decode_budget": 512, "fold_blocks": 1}'),
    ],
)
def test_every_figure_of_a_request_is_the_pool_s(tiny_model, policy, config):
    run = run_scenario(
        "scenarios_tiny:observe_reclaim", {"model": tiny_model, "policy": policy}
    )
    report = computed(
        tiny_model, config, prompt_tokens=PROMPT, answer_tokens=ANSWER, requests=1
    )
    request = report["request"]
    held_blocks = [step["held"] for step in run["steps"]]
    in_prefill = run["free_before"] - run["free_at_prefill_end"]
    assert request["prefill_peak"]["blocks"] == in_prefill
    assert request["decode_peak"]["blocks"] == max(held_blocks)
    assert request["after_prefill"]["blocks"] == held_blocks[0]


@pytest.mark.timeout(400)
def test_as_many_requests_run_at_once_as_it_says(tiny_model):
    """35 conversations in a pool for 35: all decode together, none is preempted."""
    conversations, prompt = 35, 4096
    lengths = {"prompt_tokens": prompt, "answer_tokens": 3 * conversations}
    report = computed(
        tiny_model,
        '{"budget": 256}',
        **lengths,
        requests=conversations,
        pool_bytes=537 * 32 * (2 * 2 * 2 * 32 * 4),
    )
    assert report["pool"]["requests"] == conversations
    run = run_scenario(
        "scenarios_tiny:capacity",
        {
            "model": tiny_model,
            "policy": {"name": "snapkv", "budget": 256},
            "blocks": 537,
            "conversations": conversations,
            "prompt_tokens": prompt,
        },
    )
    assert run["most_decoding"] == conversations
    assert run["preemptions"] == 0


@pytest.mark.parametrize("blocks", [257, 256])
def test_vllm_starts_in_the_pool_that_it_says(tiny_model, blocks):
    """make_llm serves 8192 positions: 256 blocks, and the null block."""
    pool_bytes = blocks * 32 * (2 * 2 * 2 * 32 * 4)
    lengths = {"prompt_tokens": 4096, "answer_tokens": 4096}
    report = computed(
        tiny_model, '{"budget": 256}', **lengths, requests=1, pool_bytes=pool_bytes
    )
    starts = report["pool"]["limit"] != "start-up"
    assert starts == (blocks == 257)
    arguments = {
        "model": tiny_model,
        "policy": {"name": "snapkv", "budget": 256},
        "blocks": blocks,
        "conversations": 1,
        "prompt_tokens": 640,
    }
    if starts:
        assert run_scenario("scenarios_tiny:capacity", arguments)["finished"] == 1
    else:
        with pytest.raises(AssertionError, match="serve at least one request"):
            run_scenario("scenarios_tiny:capacity", arguments)
