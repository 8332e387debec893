"""Speculative decoding that a policy refuses, with all reasons at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="start-up is a part of the adapter")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.model_config import FULL, SLIDING
from vllm_kvplugins.vllm_adapter.config import layer_groups, speculation, validation
from vllm_kvplugins.vllm_adapter.worker import draft_layers

WINDOWED = SimpleNamespace(
    num_hidden_layers=2, sliding_window=64, layer_types=["sliding_attention"] * 2
)


SHAPE = {"get_total_num_kv_heads": lambda: 2, "get_head_size": lambda: 32}


def problems(
    types: tuple[str, ...] = (FULL, FULL),
    **changes: Any,
) -> list[str]:
    """Reasons for a draft model; changes are dotted names with __ for a dot."""
    draft = SimpleNamespace(
        use_mla=False, hf_text_config=SimpleNamespace(num_hidden_layers=2), **SHAPE
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(**SHAPE),
        speculative_config=SimpleNamespace(
            method="draft_model",
            draft_model_config=draft,
            parallel_drafting=False,
            kv_cache_dtype=None,
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


WINDOWS = (SLIDING, SLIDING, FULL) * 2  # and two draft layers: four of each


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_drafters_run_next_to_windows(method):
    assert problems(WINDOWS, speculative_config__method=method) == []


def test_draft_layers_change_how_vllm_groups_windows():
    """Two full and four windowed layers make three groups of two; with two draft layers
    they make two groups of four."""
    text = SimpleNamespace(
        num_hidden_layers=6, sliding_window=64, layer_types=[*map(_NAMES.get, WINDOWS)]
    )
    draft = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=2))
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=text, get_num_layers=lambda parallel: 6
        ),
        parallel_config=None,
        cache_config=SimpleNamespace(sliding_window=None, block_size=32),
        max_in_flight_tokens=1,
        speculative_config=None,
    )
    alone = layer_groups.other_blocks(config, 2000)
    config.speculative_config = SimpleNamespace(
        method="draft_model", draft_model_config=draft
    )
    assert alone == 2 * layer_groups.other_blocks(config, 2000) > 0


_NAMES = {SLIDING: "sliding_attention", FULL: "full_attention"}
DRAFT = "speculative_config__draft_model_config__"
OWN_DTYPE = "speculative_config__kv_cache_dtype"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"types": (FULL, SLIDING)}, "into 3 KV cache groups"),
        (
            {"types": WINDOWS, DRAFT + "get_head_size": lambda: 64},
            "its KV heads (2 of 64 elements) must match those of the model (2 of 32)",
        ),
        (
            {"types": WINDOWS, "speculative_config__method": "mtp"},
            "have not been tried with layers of other attention",
        ),
        ({DRAFT + "use_mla": True}, "not plain full attention"),
        ({DRAFT + "hf_text_config": WINDOWED}, "not plain full attention"),
        ({"num_prefill_lookahead_tokens": 3}, "several tokens behind a chunk"),
        ({"speculative_config__parallel_drafting": True}, 'remove "parallel_drafting"'),
        (
            {OWN_DTYPE: "fp8"},
            "its dtype 'fp8' is not that of the model's cache, 'auto'",
        ),
        (
            {OWN_DTYPE: "auto", "cache_config__cache_dtype": "fp8"},
            'remove "kv_cache_dtype"',
        ),
        ({"speculative_config__method": "dflash"}, "draft_model, eagle, eagle3, mtp"),
    ],
)
def test_each_reason_names_a_remedy(changes, words):
    (problem,) = problems(**changes)
    assert codes_in(problem) == ("KVP004",)
    assert words in problem


def test_drafters_with_an_fp8_cache_run():
    assert problems(cache_config__cache_dtype="fp8") == []
    both = {"cache_config__cache_dtype": "fp8_e4m3", OWN_DTYPE: "fp8"}
    assert problems(**both) == []


# -- dtypes of caches, as the loaded layers have them ----------------------------------


def loaded(*dtypes: str) -> list[str]:
    """Reasons for two layers of a model and one of a drafter, by vLLM's names."""
    caches = {"auto": torch.float32, "bfloat16": torch.bfloat16}
    names = ("model.0", "model.1", "draft.0")
    specs = {
        name: FullAttentionSpec(
            block_size=32,
            num_kv_heads=2,
            head_size=32,
            dtype=caches.get(dtype, torch.uint8),
        )
        for name, dtype in zip(names, dtypes, strict=True)
    }
    layers = {
        name: SimpleNamespace(kv_cache_dtype=dtype)
        for name, dtype in zip(names, dtypes, strict=True)
    }
    return draft_layers.problems(["draft.0"], specs, layers)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "fp8", "fp8_e5m2"])
def test_a_drafter_may_have_the_models_cache_dtype(dtype):
    assert loaded(dtype, dtype, dtype) == []


def test_names_of_one_dtype_are_equal():
    assert loaded("fp8", "fp8_e4m3", "fp8_e4m3") == []


@pytest.mark.parametrize(
    ("model", "drafter", "words"),
    [
        ("fp8", "auto", "of float32, and the model one of float8_e4m3fn"),
        ("auto", "fp8", "of float8_e4m3fn, and the model one of float32"),
        ("fp8_e4m3", "fp8_e5m2", "of float8_e5m2, and the model one of float8_e4m3fn"),
        ("auto", "bfloat16", "of bfloat16, and the model one of float32"),
    ],
)
def test_a_drafter_with_another_cache_dtype_is_refused(model, drafter, words):
    """It would lie in the blocks of the model's layers, and have other pages."""
    (problem,) = loaded(model, model, drafter)
    assert codes_in(problem) == ("KVP004",)
    assert words in problem
    assert 'remove "kv_cache_dtype" from --speculative-config' in problem


# -- fp8 ------------------------------------------------------------------------------


def fp8_problems(
    policy: dict[str, Any], head_sizes: tuple[int, int] = (64, 64), **changes: Any
) -> list[str]:
    """Reasons for a model and a draft model over an fp8 cache."""
    model, draft = (
        SimpleNamespace(get_head_size=lambda size=size: size) for size in head_sizes
    )
    cache = {"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": []} | changes
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(**cache),
        speculative_config=SimpleNamespace(
            method="draft_model", draft_model_config=draft
        ),
    )
    return validation.fp8_problems(config, parse_policy(policy))


@pytest.fixture
def avx512(monkeypatch):
    monkeypatch.setattr(validation, "_cpu_has", lambda check: True)


@pytest.mark.parametrize("name", ["full", "snapkv", "flowkv", "h2o", "icecache"])
def test_policies_speculate_over_an_fp8_cache(avx512, name):
    assert fp8_problems({"name": name}) == []


@pytest.mark.parametrize(
    ("policy", "changes", "words"),
    [
        ({"name": "sekv"}, {}, "its kernels read plain elements"),
        ({"name": "icecache", "host_dtype": "int8"}, {}, "quantized already"),
        ({"name": "icecache", "host_fetch": "direct"}, {}, "'direct' has not been"),
        ({"name": "snapkv"}, {"head_sizes": (64, 80)}, "not 80 in the drafter"),
        ({"name": "snapkv"}, {"head_sizes": (80, 64)}, "not 80;"),
        (
            {"name": "snapkv"},
            {"kv_cache_dtype_skip_layers": ["0"]},
            "pages of different sizes",
        ),
    ],
)
def test_what_fp8_refuses_is_refused_with_drafts(avx512, policy, changes, words):
    (problem,) = fp8_problems(policy, **changes)
    assert codes_in(problem) == ("KVP019",)
    assert words in problem


def test_fp8_with_drafts_needs_vllms_kernel(monkeypatch):
    monkeypatch.setattr(validation, "_cpu_has", lambda check: False)
    (problem,) = fp8_problems({"name": "snapkv"})
    assert "needs AVX-512" in problem


def test_all_reasons_are_reported_at_once():
    reasons = problems((FULL, SLIDING), speculative_config__parallel_drafting=True)
    assert len(reasons) == 2
