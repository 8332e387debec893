"""Prefill and decode on two live servers, with vLLM's ExampleConnector.

Clients do what a router does: each prompt goes to the prefill server for one token, and
then to the decode server, which loads exact keys and values and compacts them.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import engine_environment
from live_server import metric, post, serving
from scenarios_kv_connectors import ANSWER, prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ENGINE = (
    *("--dtype", "float32", "--block-size", "32", "--max-model-len", "1024"),
    # files of this connector hold whole prompts, so each must be one chunk
    *("--max-num-batched-tokens", "1024", "--num-gpu-blocks-override", "200"),
)
POLICY = ("--kv-policy", "snapkv", "--kv-policy-config", '{"budget": 96}')
_COMPACTIONS = "vllm:kv_policy_compressions_total"


def role(name: str, folder: Path) -> tuple[str, str]:
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": name,
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return "--kv-transfer-config", json.dumps(transfer)


def complete(base: str, prompt: list[int], max_tokens: int) -> list[int]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    answer = post(base, "/v1/completions", return_token_ids=True, **body)
    return list(answer["choices"][0]["token_ids"])


def test_a_pair_of_live_servers_gives_the_tokens_of_one(tiny_model, tmp_path):
    environment = engine_environment(VLLM_ENABLE_V1_MULTIPROCESSING="1")
    start = (sys.executable, tiny_model, tmp_path, *ENGINE)
    kv = tmp_path / "kv"

    with serving(*start, *POLICY, **environment) as base:
        expected = {n: complete(base, p, ANSWER) for n, p in prompts().items()}

    with (
        serving(*start, *role("kv_producer", kv), **environment) as prefill,
        serving(*start, *POLICY, *role("kv_consumer", kv), **environment) as decode,
        ThreadPoolExecutor() as clients,
    ):

        def routed(prompt: list[int]) -> list[int]:
            complete(prefill, prompt, 1)
            return complete(decode, prompt, ANSWER)

        # Together: while some prompts are read, others are answered.
        names = list(prompts())
        tokens = dict(zip(names, clients.map(routed, prompts().values()), strict=True))
        loaded = metric(decode, "vllm:external_prefix_cache_hits_total")
        compactions = metric(decode, _COMPACTIONS)

    assert tokens == expected
    assert len(set(map(tuple, tokens.values()))) == len(names)
    # "short" keeps everything; the other two are loaded up to their last window.
    assert compactions == 2
    assert loaded > sum(map(len, prompts().values())) / 2
