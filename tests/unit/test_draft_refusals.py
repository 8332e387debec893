"""Speculative decoding that a policy refuses, with all reasons at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="start-up is a part of the adapter")

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.model_config import FULL, SLIDING
from vllm_kvplugins.vllm_adapter.config import speculation

WINDOWED = SimpleNamespace(
    num_hidden_layers=2, sliding_window=64, layer_types=["sliding_attention"] * 2
)


def problems(
    types: tuple[str, ...] = (FULL, FULL),
    **changes: Any,
) -> list[str]:
    """Reasons for a draft model; changes are dotted names with __ for a dot."""
    draft = SimpleNamespace(
        use_mla=False, hf_text_config=SimpleNamespace(num_hidden_layers=2)
    )
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="draft_model", draft_model_config=draft, parallel_drafting=False
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        num_prefill_lookahead_tokens=0,
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        owner: Any = config
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    policy = parse_policy("snapkv")
    return speculation.problems(config, policy, types)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_drafters_with_a_cache_run(method):
    assert problems(speculative_config__method=method) == []


DRAFT = "speculative_config__draft_model_config__"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"types": (FULL, SLIDING)}, "which has others too; use a drafter without"),
        ({"cache_config__cache_dtype": "fp8"}, "use --kv-cache-dtype auto"),
        ({DRAFT + "use_mla": True}, "not plain full attention"),
        ({DRAFT + "hf_text_config": WINDOWED}, "not plain full attention"),
        ({"num_prefill_lookahead_tokens": 3}, "several tokens behind a chunk"),
        ({"speculative_config__parallel_drafting": True}, 'remove "parallel_drafting"'),
        ({"speculative_config__method": "dflash"}, "draft_model, eagle, eagle3, mtp"),
    ],
)
def test_each_reason_names_a_remedy(changes, words):
    (problem,) = problems(**changes)
    assert codes_in(problem) == ("KVP004",)
    assert words in problem


def test_all_reasons_are_reported_at_once():
    reasons = problems((FULL, SLIDING), speculative_config__parallel_drafting=True)
    assert len(reasons) == 2
