"""Largest and summed attention of many queries, against float64 with one large mask."""

from __future__ import annotations

import pytest
import torch

from vllm_kvplugins.scoring import attention_votes

KV_HEADS, GROUP, SLOTS, QUERIES, DIM = 2, 3, 90, 50, 8
SCALE = 0.4


@pytest.fixture(params=[1, 12_000, 1 << 20], ids=["fewest", "some", "all"])
def parts(request, monkeypatch) -> None:
    """How many queries are in a part."""
    monkeypatch.setattr(attention_votes, "_MAX_WEIGHTS", {"cpu": request.param})


@pytest.fixture(params=["in order", "any order", "gaps"])
def positions(request) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    order = torch.arange(SLOTS).repeat(KV_HEADS, 1)
    if request.param == "any order":
        order = torch.stack([torch.randperm(SLOTS, generator=random) for _ in order])
    if request.param == "gaps":
        order[0, ::3] = -1
        # In the second head the first query sees its own token only.
        order[1, : SLOTS - QUERIES] = -1
    return order


def expected(queries, keys, query_positions, positions) -> torch.Tensor:
    """float64 [num_kv_heads, group, queries, slots]; 0 where there is no token."""
    grouped = queries.double().unflatten(0, (KV_HEADS, GROUP))
    logits = torch.einsum("hgqd,hsd->hgqs", grouped, keys.double()) * SCALE
    at = positions[:, None]
    hidden = (at < 0) | (at > query_positions[:, None])
    return logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1)


def test_peak_and_mass_are_those_of_all_weights(parts, positions) -> None:
    torch.manual_seed(5)
    queries = torch.randn(KV_HEADS * GROUP, QUERIES, DIM)
    keys = torch.randn(KV_HEADS, SLOTS, DIM)
    newest = torch.arange(SLOTS - QUERIES, SLOTS)
    want = expected(queries, keys, newest, positions)
    at = (queries, keys, SCALE, newest, positions)
    peak = attention_votes.attention_peak(*at)
    mass = attention_votes.attention_mass(*at)
    torch.testing.assert_close(peak, want.amax((1, 2)).float(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(mass, want.sum(2).mean(1).float(), atol=1e-5, rtol=1e-5)
