"""Spans between surprising tokens are compared with others of equal length."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
import span_factors

from vllm_kvplugins import ops
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.plan.geometry import Geometry

SEED = 20261122
TOKENS = 320


def surprisal() -> torch.Tensor:
    rng = torch.Generator().manual_seed(SEED)
    print("seed", SEED)
    values = torch.rand(TOKENS, generator=rng)
    values[[60, 70, 140, 260]] = 9.0  # 61..69 is shorter than L_min
    return values


def test_the_plain_rule_leaves_out_anchors_sinks_and_short_spans():
    cut = span_factors.plain_rule(surprisal())
    assert cut.sizes.tolist() == [56, 69, 119, 59]
    expected = [*range(4, 60), *range(71, 140), *range(141, 260), *range(261, 320)]
    assert cut.positions.tolist() == expected


def test_a_policys_cut_is_what_does_not_stay():
    policy = parse_policy({"name": "sekv", "budget": 160})
    geometry = Geometry(32, 1, 1, 4 * 16)
    cut = span_factors.of_policy(surprisal(), policy, geometry)
    (compaction,) = policy.plan(span_factors.Lengths(TOKENS), geometry).compactions
    assert len(cut.positions) == TOKENS - 32 * len(compaction.retained)
    assert int(cut.sizes.sum()) == len(cut.positions)
    assert int(cut.positions[0]) >= 4


def test_controls_have_the_same_mean_length():
    own = span_factors.plain_rule(surprisal())
    same, shuffled, chunks, everything = span_factors.controls(own, seed=1)
    assert same is own
    assert sorted(shuffled.sizes.tolist()) == sorted(own.sizes.tolist())
    assert shuffled.sizes.tolist() != own.sizes.tolist()
    assert chunks.sizes.tolist() == [75, 76, 76, 76]
    for other in (shuffled, chunks):
        assert torch.equal(other.positions, own.positions)
    # 303 tokens in 4 spans; 316 with the anchors and the short span
    assert everything.positions.tolist() == [*range(4, TOKENS)]
    assert everything.sizes.tolist() == [79] * 4


def test_energy_and_error_are_of_all_tokens_together():
    if ops.extension_info()["reason"]:
        pytest.skip("factors come from the extension")
    rng = torch.Generator().manual_seed(SEED)
    print("seed", SEED)
    rows = torch.randn(2, 60, 64, generator=rng).bfloat16()
    rows[1] *= 3
    cut = span_factors.Cut("any", torch.arange(10, 50), torch.tensor([30, 10]))
    values = {int(row["rank"]): row for row in span_factors.kept([rows], cut)}
    for plane, half in enumerate(("key", "value")):
        parts = rows[plane, 10:40].float(), rows[plane, 40:50].float()
        kept = sum(
            float(torch.linalg.svdvals(part)[:8].double().square().sum())
            for part in parts
        )
        energy = kept / float(rows[plane, 10:50].double().square().sum())
        assert values[8][f"{half}_energy"] == pytest.approx(energy, abs=1e-4)
        error = (1 - energy) ** 0.5
        assert values[8][f"{half}_error"] == pytest.approx(error, abs=0.01)
        assert values[32][f"{half}_error"] < 0.01
    assert values[8]["size"] == pytest.approx((8 * 95 + 8 * 75) / (40 * 64), rel=0.02)


def test_a_table_says_on_how_many_documents_others_are_better():
    def row(document: str, spans: str, error: float) -> dict[str, object]:
        facts = {"document": document, "anchors": "paper", "spans": spans, "rank": 8.0}
        numbers = dict.fromkeys(span_factors.MEASURES, error)
        return {**facts, "mean_span": 20.0, **numbers}

    rows = [row(d, "surprise", 0.2) for d in "abc"]
    rows += [row("a", "chunks", 0.1), row("b", "chunks", 0.201), row("c", "chunks", 1)]
    own, chunks = span_factors.summary(rows)
    assert own["keys better, worse"] == "0, 0"
    assert chunks["keys better, worse"] == "1, 1"
    assert chunks["value_error"] == "0.434 ± 0.493"
