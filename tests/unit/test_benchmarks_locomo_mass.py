"""Kept attention to a dialogue, on a constructed cache and a tiny model."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
import locomo_mass as benchmark
from _masked_model import MaskedModel
from texts import random_tokens
from tiny_model import KV_HEADS, LAYERS, VOCABULARY, write_tiny_model

SEED = 3


def test_what_came_behind_the_last_compaction_is_there():
    mask = benchmark.mask_of([[[0, 3, 4], [1, 4]]], 7)
    assert mask.int().tolist() == [[[1, 0, 0, 1, 1, 1, 1], [0, 1, 0, 0, 1, 1, 1]]]
    # the history ends before the last compaction
    assert benchmark.mask_of([[[0, 5], [2]]], 4).int().tolist() == [
        [[1, 0, 0, 0], [0, 0, 1, 0]]
    ]


def test_a_cache_that_was_brought_back_is_the_one_that_was_read():
    rows = [
        {"question": 0, "cache": 0, "kept": [[[0, 2]]]},
        {"question": 1, "cache": 1, "kept": [[[1, 2]]]},
        {"question": 2, "cache": 0},
    ]
    masks = dict(benchmark.kept_masks(iter(rows), 3))
    assert masks[2].equal(masks[0])
    assert not masks[1].equal(masks[0])


def test_what_is_kept_of_early_and_late():
    mask = torch.zeros(1, 2, 10, dtype=torch.bool)
    mask[0, :, :2] = True
    mask[0, 1, 9] = True
    assert benchmark.by_part(mask) == [1.0, 0.0, 0.0, 0.0, 0.25]
    rows = {"keydiff": [{"kept_by_part": [0.0, 1.0]}, {"kept_by_part": [0.5, 1.0]}]}
    table = benchmark.parts_table(rows)
    assert [list(column.cells) for column in table.columns[:3]] == [
        ["keydiff"],
        ["0.250"],
        ["1.000"],
    ]


def test_shares_of_two_halves_make_one(tmp_path):
    print("seed", SEED)
    model = MaskedModel(write_tiny_model(tmp_path / "m", SEED))
    ids = random_tokens(SEED, 70, VOCABULARY)
    probe = benchmark.ProbeRequest(model)
    whole = torch.ones(LAYERS, KV_HEADS, 60, dtype=torch.bool)
    assert probe.share(0, ids, 60, whole) == pytest.approx(1.0)
    first = whole.clone()
    first[..., 30:] = False
    halves = [probe.share(0, ids, 60, part) for part in (first, ~first)]
    assert sum(halves) == pytest.approx(1.0)
    # another question has its own queries
    other = ids[:60] + random_tokens(SEED + 1, 10, VOCABULARY)
    assert probe.share(1, other, 60, first) != pytest.approx(halves[0], abs=1e-9)
