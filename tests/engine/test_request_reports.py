"""Reports about single requests agree with the block pool and the metrics."""

from __future__ import annotations

import functools
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from harness import engine_environment, run_scenario
from live_server import post, serving

pytestmark = pytest.mark.engine

BLOCK, ANSWER = 32, 40
POLICY = {
    "name": "snapkv",
    "budget": 128,
    "window": 16,
    "sessions": True,
    "session_memory": "64MiB",
}


@functools.cache
def turns(model: str) -> list[dict[str, Any]]:
    arguments = {"model": model, "policy": POLICY}
    result: list[dict[str, Any]] = run_scenario("scenarios_tiny:reports", arguments)
    return result


def test_held_blocks_are_those_of_the_pool(tiny_model):
    for turn in turns(tiny_model)[:2]:
        report = turn["returned"]["kv_policy"]
        tokens = turn["prompt_tokens"] + ANSWER - 1
        assert report["tokens"] == tokens
        assert report["held_blocks"] == turn["held"]
        assert report["stock_blocks"] == -(-tokens // BLOCK) > 2 * turn["held"]


def test_a_report_is_the_growth_of_the_counters_where_nobody_else_is(tiny_model):
    first, second = turns(tiny_model)[:2]
    for turn in (first, second):
        report, growth = turn["returned"]["kv_policy"], turn["growth"]
        assert report["compressions"] == growth["compressions"]
        assert report["session_tokens"] == growth["session_restored_tokens"]
        assert report["session_on_device"] == growth["session_parked_hits"]
        assert report["session_bytes"] == growth["session_bytes"] > 0
    assert first["returned"]["kv_policy"]["session_tokens"] == 0
    restored = second["returned"]["kv_policy"]["session_tokens"]
    assert restored == first["returned"]["kv_policy"]["tokens"]


def test_a_request_that_does_not_ask_gets_nothing(tiny_model):
    assert turns(tiny_model)[2]["returned"] is None


CHAT = "{% for m in messages %}{{ m.content }} {% endfor %}"


@pytest.mark.slow
def test_responses_of_a_server_have_the_report(tiny_model, tmp_path: Path):
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT)
    options = {name: value for name, value in POLICY.items() if name != "name"}
    command = (
        *("--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "1024"),
        *("--num-gpu-blocks-override", "200", "--chat-template", str(template)),
        *("--kv-policy", "snapkv", "--kv-policy-config", json.dumps(options)),
    )
    words = " ".join(f"t{i}" for i in range(200, 600))
    chat = {"messages": [{"role": "user", "content": words}], "max_tokens": 8}
    chat |= {"ignore_eos": True, "stream_options": None}
    environment = engine_environment(VLLM_ENABLE_V1_MULTIPROCESSING="1")
    with serving(sys.executable, tiny_model, tmp_path, *command, **environment) as base:
        path = "/v1/chat/completions"
        whole = post(base, path, **chat, vllm_xargs={"kv_report": True})
        plain = post(base, path, **chat)
        body = chat | {"stream": True, "model": "m", "temperature": 0}
        streams = []
        for asks in (True, False):
            request = urllib.request.Request(
                base + path,
                json.dumps(body | {"vllm_xargs": {"kv_report": asks}}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=300) as response:
                streams.append(response.read().decode())
    assert plain["kv_transfer_params"] is None
    report = whole["kv_transfer_params"]["kv_policy"]
    assert report["tokens"] == whole["usage"]["prompt_tokens"] + 7
    assert report["held_blocks"] < report["stock_blocks"]
    with_report, without = ([e for e in s.split("\n\n") if e] for s in streams)
    assert with_report[-1] == without[-1] == "data: [DONE]"
    event = json.loads(with_report[-2].removeprefix("data: "))
    streamed = event["kv_transfer_params"]["kv_policy"]
    assert streamed["tokens"] == report["tokens"]
    assert streamed["held_blocks"] == report["held_blocks"]
    assert len(with_report) == len(without) + 1
    assert "kv_transfer_params" not in "".join(without)
