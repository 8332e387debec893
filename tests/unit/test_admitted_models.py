"""The RoPE that policies undo, and what only a loaded model shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="reads the layers of vLLM's models")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.vllm_adapter.config import validation
from vllm_kvplugins.vllm_adapter.worker.rotary import rotary_of

SEED = 5
HEAD_DIM, POSITIONS = 32, 512

# name -> parameters of get_rope besides the base
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "half": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
M_ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6]}


def rope(parameters: dict[str, Any], is_neox: bool = True, base: float = 1e4) -> Any:
    with set_current_vllm_config(VllmConfig()):
        return get_rope(
            HEAD_DIM,
            max_position=POSITIONS,
            is_neox_style=is_neox,
            rope_parameters={"rope_theta": base, **parameters},
            dtype=torch.float32,
        )


class Model(nn.Module):
    def __init__(self, *ropes: nn.Module, **config: Any) -> None:
        super().__init__()
        self.ropes = nn.ModuleList(ropes)
        self.config = SimpleNamespace(**config)


class VisionModel(Model):
    """A model whose vision tower has a RoPE of its own."""

    def __init__(self, tower: nn.Module, language_model: nn.Module) -> None:
        super().__init__(tower)
        self.language_model = language_model

    def get_language_model(self) -> nn.Module:
        return self.language_model


@pytest.mark.parametrize("is_neox", [True, False], ids=["halves", "pairs"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_layer_of_vllm_rotates_is_undone(kind, is_neox):
    print("seed", SEED)
    layer = rope(KINDS[kind], is_neox)
    generator = torch.Generator().manual_seed(SEED)
    before = torch.randn(9, 3, HEAD_DIM, generator=generator)
    positions = torch.tensor([0, 1, 2, 5, 77, 100, 300, 301, 500])
    after, _ = layer.forward_native(positions, before.flatten(1), None)
    after = after.view(before.shape).transpose(0, 1)
    assert not after[:, 1:].allclose(before.transpose(0, 1)[:, 1:])
    rotary = rotary_of(Model(layer, rope(KINDS[kind], is_neox)), ())
    assert rotary is not None
    undone = rotary.undo(after, positions)
    torch.testing.assert_close(undone, before.transpose(0, 1), atol=1e-5, rtol=1e-4)


def test_a_vision_tower_does_not_count():
    default, other = rope(KINDS["default"]), rope(KINDS["half"], base=100.0)
    rotary = rotary_of(VisionModel(other, Model(default)), ())
    assert rotary is not None
    assert rotary.cos.shape[1] == HEAD_DIM // 2
    assert rotary_of(VisionModel(default, Model(rope(M_ROPE))), ()) is None


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: Model(), id="none"),
        pytest.param(lambda: Model(rope(M_ROPE)), id="M-RoPE"),
        pytest.param(
            lambda: Model(rope(KINDS["default"]), rope(KINDS["default"], base=1e6)),
            id="two bases",
        ),
        pytest.param(
            lambda: Model(rope(KINDS["default"]), rope(KINDS["default"], False)),
            id="two orders",
        ),
        pytest.param(
            lambda: Model(rope(KINDS["default"]), no_rope_layers=[1, 1, 0, 1]),
            id="layers without",
        ),
    ],
)
def test_a_rope_that_cannot_be_undone_is_none(model):
    assert rotary_of(model(), ()) is None


def test_a_list_of_layers_that_all_have_rope_is_no_obstacle():
    model = Model(rope(KINDS["default"]), no_rope_layers=[1, 1])
    assert rotary_of(model, ()) is not None


@pytest.mark.parametrize("prefix_lm", [True, False])
def test_models_that_attend_to_images_in_both_directions_are_refused(prefix_lm):
    model = SimpleNamespace(
        model="tiny",
        runner_type="generate",
        use_mla=False,
        is_hybrid=False,
        is_attention_free=False,
        is_encoder_decoder=False,
        is_mm_prefix_lm=prefix_lm,
        hf_text_config=SimpleNamespace(),
        get_sliding_window=lambda: None,
    )
    found = validation.model_problems(model)
    assert codes_in("\n".join(found)) == (("KVP045",) if prefix_lm else ())


@pytest.mark.parametrize(("values", "expected"), [(32, ()), (16, ("KVP046",))])
def test_layers_with_smaller_values_are_refused(values, expected):
    impl = SimpleNamespace(
        head_size=32,
        alibi_slopes=None,
        sinks=None,
        sliding_window=(-1, -1),
        kv_sharing_target_layer_name=None,
        logits_soft_cap=0,
    )
    layer = SimpleNamespace(impl=impl, head_size_v=values)
    problems = validation.layer_problems(
        "layer", layer, parse_policy({"name": "snapkv"})
    )
    assert codes_in("\n".join(problems)) == expected
