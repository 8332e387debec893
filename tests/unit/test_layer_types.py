"""Which layers a policy manages, and how vLLM groups layers, from configurations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_kvplugins.model_config import (
    CHUNKED,
    FULL,
    SLIDING,
    STATE,
    ConfigOnlyModel,
    groups_of,
    layer_types,
)


def types_of(num_layers: int, **fields: object) -> tuple[str, ...]:
    return layer_types(SimpleNamespace(**fields), num_layers)


def test_a_model_without_windows_has_full_attention_only():
    assert types_of(3) == (FULL,) * 3
    assert types_of(2, sliding_window=None, layer_types=None) == (FULL,) * 2


def test_layer_types_are_taken_from_the_file():
    given = [SLIDING, FULL, SLIDING]
    assert types_of(3, sliding_window=64, layer_types=given) == tuple(given)
    assert types_of(2, sliding_window=64, layer_types=given) == (SLIDING, FULL)


def test_a_window_without_types_is_in_all_layers():
    assert types_of(2, sliding_window=64) == (SLIDING,) * 2
    assert types_of(2, attention_chunk_size=64) == (CHUNKED,) * 2


@pytest.mark.parametrize("off", [{"sliding_window": 0}, {"use_sliding_window": False}])
def test_a_window_that_is_off_counts_as_full(off):
    fields = {"sliding_window": 64, "layer_types": [SLIDING, FULL]} | off
    assert types_of(2, **fields) == (FULL, FULL)


def test_older_files_name_a_pattern_or_rely_on_their_class():
    expected = (SLIDING,) * 5 + (FULL,) + (SLIDING,) * 2
    assert types_of(8, sliding_window=512, sliding_window_pattern=6) == expected
    assert types_of(8, sliding_window=512, model_type="gemma3_text") == expected
    chunked = types_of(8, attention_chunk_size=64, model_type="llama4_text")
    assert chunked == ((CHUNKED,) * 3 + (FULL,)) * 2
    alternating = types_of(4, sliding_window=64, model_type="gpt_oss")
    assert alternating == (SLIDING, FULL) * 2


def test_other_kinds_of_layers_stay_named():
    assert types_of(2, layer_types=["some_attention", FULL])[0] == "some_attention"


# Fields of released files, without the number of layers; counts of caches.
RELEASED = {
    "Qwen3-Next-80B": ({"full_attention_interval": 4}, 48, 12, 36),
    "Qwen3.5, without a list": ({"model_type": "qwen3_5_text"}, 32, 8, 24),
    "Nemotron-H-8B": (
        {"hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"},
        52,
        4,
        24,
    ),
    "Nemotron 3, with MoE": ({"layers_block_type": [*"MEM*E"]}, 0, 1, 2),
    "Jamba": ({"attn_layer_period": 8, "attn_layer_offset": 4}, 32, 4, 28),
    "Granite-4-H-tiny": (
        {"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4},
        40,
        4,
        36,
    ),
    "Falcon-H1": ({"model_type": "falcon_h1"}, 24, 24, 24),
    "Zamba2": ({"layers_block_type": (["mamba"] * 5 + ["hybrid"]) * 9}, 54, 9, 54),
    "LFM2-1.2B": ({"full_attn_idxs": [2, 5, 8, 10, 12, 14]}, 16, 6, 10),
}


@pytest.mark.parametrize("name", RELEASED)
def test_recurrent_layers_are_told_from_attention(name):
    fields, num_layers, full, states = RELEASED[name]
    types = types_of(num_layers, **fields)
    assert (types.count(FULL), types.count(STATE)) == (full, states)
    assert set(types) == {FULL, STATE}
    assert groups_of(types)[FULL] == 1, "the policy manages one group"
    sizes = {"num_hidden_layers": num_layers} if num_layers else {}
    file = ConfigOnlyModel("m", "torch.bfloat16", fields | sizes)
    assert file.is_hybrid
    assert file.layer_types == types


def test_a_hybrid_configuration_may_have_attention_only():
    fields = {"layer_types": ["attention"] * 3, "mamba_d_state": 128}
    file = ConfigOnlyModel("m", "torch.bfloat16", fields | {"num_hidden_layers": 3})
    assert file.layer_types == (FULL,) * 3
    assert not file.is_hybrid


class TestGroups:
    """As ``kv_cache_utils`` of vLLM groups them."""

    @pytest.mark.parametrize(
        ("full", "sliding", "groups"),
        [
            (3, 15, (1, 5)),  # Gemma-3-270m
            (12, 12, (1, 1)),  # gpt-oss
            (10, 52, (1, 6)),  # Gemma-3-27B; one group is padded
            (13, 12, (1, 1)),  # padded to 13 each
            (6, 3, (2, 1)),  # more full than windowed layers
        ],
    )
    def test_groups_have_equal_layer_counts(self, full, sliding, groups):
        pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")
        import torch
        from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

        types = (FULL,) * full + (SLIDING,) * sliding
        assert groups_of(types) == dict(zip((FULL, SLIDING), groups, strict=True))

        shape = {
            "block_size": 32,
            "num_kv_heads": 1,
            "head_size": 64,
            "dtype": torch.float32,
        }
        specs = {FULL: FullAttentionSpec(**shape)}
        specs[SLIDING] = SlidingWindowSpec(**shape, sliding_window=64)
        layers = {str(i): specs[kind] for i, kind in enumerate(types)}
        actual = [
            group.kv_cache_spec
            for group in _get_kv_cache_groups_uniform_page_size(layers)
        ]
        assert tuple(actual.count(specs[kind]) for kind in (FULL, SLIDING)) == groups

    def test_one_kind_is_one_group(self):
        pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")
        assert groups_of((FULL,) * 30) == {FULL: 1}
