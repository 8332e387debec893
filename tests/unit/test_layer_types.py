"""Which layers a policy manages, and how vLLM groups layers, from configurations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_kvplugins.model_config import CHUNKED, FULL, SLIDING, layer_types


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
    assert types_of(2, layer_types=["linear_attention", FULL])[0] == "linear_attention"


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

        from vllm_kvplugins.vllm_adapter.config.layer_groups import groups_of

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
        from vllm_kvplugins.vllm_adapter.config.layer_groups import groups_of

        assert groups_of((FULL,) * 30) == {FULL: 1}
