"""CriticalKV against algorithm 1 of its paper, and where its weights come from."""

from __future__ import annotations

import pytest
import torch
from views import make_layer_view
from vllm.model_executor.layers.linear import RowParallelLinear

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.criticalkv import CriticalKV, projected_norms
from vllm_kvplugins.scoring.selection import keep_top
from vllm_kvplugins.vllm_adapter.worker.output_weights import (
    output_weight_problems,
    output_weights_of,
)

SEED, HEADS, GROUP, SLOTS, DIM, HIDDEN, WINDOW = 20261126, 2, 3, 60, 8, 20, 5
BUDGET = 24
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED + seed))


WEIGHT = randn(HIDDEN, HEADS * GROUP * DIM, seed=9)


def make_view(**changes: object) -> LayerView:
    values = randn(HEADS, SLOTS, DIM, seed=1)
    weights = randn(HEADS * GROUP, DIM, HIDDEN, seed=2)
    given = {
        "layer": 0,
        "keys": randn(HEADS, SLOTS, DIM, seed=3),
        "positions": torch.arange(SLOTS).expand(HEADS, -1),
        "queries": randn(HEADS * GROUP, WINDOW, DIM, seed=4),
        "query_positions": torch.arange(SLOTS - WINDOW, SLOTS),
        "scale": 0.4,
        "budget_tokens": BUDGET,
        "load_values": lambda: values,
        "load_output_weights": lambda: weights,
    }
    return make_layer_view(**given | changes)


def make_policy(name: str = "criticalkv", **options: object) -> CriticalKV:
    return parse_policy({"name": name, "window": WINDOW, "budget": BUDGET, **options})


def norms_by_hand(view: LayerView) -> torch.Tensor:
    """Mean over the group of the L1 norm of each projected value, in float64."""
    norms = torch.zeros(HEADS, SLOTS, dtype=torch.float64)
    for head in range(HEADS * GROUP):
        for slot in range(SLOTS):
            value = view.values[head // GROUP, slot].double()
            added = value @ view.output_weights[head].double()
            norms[head // GROUP, slot] += sum(abs(x) for x in added.tolist()) / GROUP
    return norms


def kept_by_the_paper(
    view: LayerView, attention: torch.Tensor, first: int, epsilon: float
) -> list[set[int]]:
    """Slots that each head keeps: two stages, one token at a time."""
    kept = []
    for head, norms in enumerate(norms_by_hand(view)):
        rest = attention[head].tolist()
        chosen: set[int] = set()
        while len(chosen) < BUDGET:
            left = [slot for slot in range(SLOTS) if slot not in chosen]
            if len(chosen) < first:
                worth = dict(zip(left, (rest[slot] for slot in left), strict=True))
            else:
                worth = {s: (rest[s] + epsilon) * float(norms[s]) for s in left}
            chosen.add(max(left, key=lambda slot: worth[slot]))
        kept.append(chosen)
    return kept


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_two_stages_choose_the_papers_tokens(share):
    policy, view = make_policy(first_stage=share), make_view()
    scores = policy.score(view)
    keep = keep_top(scores, torch.tensor([BUDGET] * HEADS))
    attention = make_policy("snapkv").score(view).nan_to_num(posinf=1e9)
    first = max(int(BUDGET * share), WINDOW)
    expected = kept_by_the_paper(view, attention, first, policy.epsilon)
    assert [set(row.nonzero()[:, 0].tolist()) for row in keep] == expected


def test_with_attention_alone_the_tokens_are_snapkvs():
    """And with half of the budget, they are not."""
    view, counts = make_view(), torch.tensor([BUDGET] * HEADS)
    snapkv = keep_top(make_policy("snapkv").score(view), counts)
    alone = keep_top(make_policy(first_stage=1.0).score(view), counts)
    assert torch.equal(alone, snapkv)
    assert not torch.equal(keep_top(make_policy().score(view), counts), snapkv)


def test_norms_are_those_of_projected_values(monkeypatch):
    view = make_view()
    expected = norms_by_hand(view)
    torch.testing.assert_close(projected_norms(view).double(), expected, **CLOSE)
    monkeypatch.setattr("vllm_kvplugins.scoring.attention_votes._MAX_TILE", 7 * HIDDEN)
    torch.testing.assert_close(projected_norms(view).double(), expected, **CLOSE)


def test_slots_without_a_token_are_not_read():
    view = make_view()
    valid = torch.ones(HEADS, SLOTS, dtype=torch.bool)
    valid[1, :50] = False  # fewer tokens than the first stage keeps
    keys, values = view.keys.clone(), view.values.clone()
    keys[~valid] = values[~valid] = torch.nan
    padded = make_view(
        keys=keys,
        valid=valid,
        positions=view.positions.masked_fill(~valid, -1),
        load_values=lambda: values,
    )
    scores = make_policy().score(padded)
    assert not scores.isnan().any()
    assert scores[1, :50].isneginf().all()
    assert scores[1, 50:].gt(-torch.inf).all()


def test_a_value_that_overflowed_costs_its_own_slot_only():
    view = make_view()
    values = view.values.clone()
    values[0, 7] = torch.nan
    scores = make_policy(first_stage=0.0).score(make_view(load_values=lambda: values))
    assert scores.isnan().sum() == scores[0, 7].isnan() == 1


# -- weights of a loaded model -----------------------------------------------------


class Attention(torch.nn.Module):
    """What the search reads of vLLM's attention layer."""

    num_heads, head_size = HEADS * GROUP, DIM


class Block(torch.nn.Module):
    """An attention block with its projections, and others next to it."""

    def __init__(self, *outputs: torch.nn.Module) -> None:
        super().__init__()
        self.attn = Attention()
        self.qkv_proj = torch.nn.Linear(HEADS * GROUP * DIM, 3)
        for index, output in enumerate(outputs):
            setattr(self, f"o_proj{index}", output)


@pytest.fixture
def linear(monkeypatch):
    """Makes vLLM's row-parallel layers without a distributed group."""
    for module in ("layers.linear", "parameter"):
        for name, value in (("rank", 0), ("world_size", 1)):
            monkeypatch.setattr(
                f"vllm.model_executor.{module}.get_tensor_model_parallel_{name}",
                lambda value=value: value,
            )

    def make(width: int = HEADS * GROUP * DIM, more: float = 0.0) -> RowParallelLinear:
        layer = RowParallelLinear(width, HIDDEN, bias=True, params_dtype=torch.float32)
        layer.weight.data = WEIGHT[:, :width] + more
        layer.bias.data.fill_(5)
        layer.quant_method.process_weights_after_loading(layer)
        return layer

    return make


def test_weights_are_read_by_projecting_the_identity(linear):
    """Without the bias, after vLLM has packed the weight and removed it."""
    block = Block(linear(), linear(DIM))
    (found,) = output_weights_of(torch.nn.ModuleList([block]), [block.attn])
    expected = WEIGHT.T.reshape(HEADS * GROUP, DIM, HIDDEN)
    torch.testing.assert_close(found(), expected)


def test_projections_come_in_the_order_of_the_layers(linear):
    blocks = [Block(linear()), Block(linear(more=1.0))]
    layers = [blocks[1].attn, blocks[0].attn]
    first, second = output_weights_of(torch.nn.ModuleList(blocks), layers)
    torch.testing.assert_close(first(), second() + 1)


def test_adapters_are_looked_through(linear):
    class WithAdapter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = linear()

    block = Block(WithAdapter())
    (found,) = output_weights_of(torch.nn.ModuleList([block]), [block.attn])
    assert found().shape == (HEADS * GROUP, DIM, HIDDEN)


def test_models_without_one_projection_per_layer_are_refused(linear):
    blocks = [Block(linear()), Block()], [Block(linear(), linear())]
    for model in blocks:
        layers = [block.attn for block in model]
        found = output_weights_of(torch.nn.ModuleList(model), layers)
        assert found is None
        assert "[KVP041]" in output_weight_problems(make_policy(), found)[0]
        assert output_weight_problems(make_policy("snapkv"), found) == []
