"""Attention to selected tokens and to means of the others."""

from __future__ import annotations

import pytest
import torch
import typer
import unselected_means as script

HEADS, GROUP, TOKENS, DIM = 2, 3, 50, 8
CANDIDATES = range(4, 41)


def full(query, keys, values):
    grouped = query.view(HEADS, GROUP, DIM)
    return ((grouped @ keys.mT).softmax(-1) @ values).flatten(0, 1)


@pytest.fixture
def inputs():
    random = torch.Generator().manual_seed(3)
    query = torch.randn(HEADS * GROUP, DIM, generator=random)
    keys, values = torch.randn(2, HEADS, TOKENS, DIM, generator=random)
    return query, keys, values


@pytest.mark.parametrize(
    ("held", "chunk"),
    [(len(CANDIDATES), 0), (100, 0), (len(CANDIDATES), 1), (100, 7)],
    ids=["all", "more", "a-mean-each", "means-of-nothing"],
)
def test_nothing_is_lost_if_all_are_held_or_means_are_of_one(inputs, held, chunk):
    query, keys, values = inputs
    attended = script.attend_selected(query, keys, values, 1.0, CANDIDATES, held, chunk)
    torch.testing.assert_close(attended, full(query, keys, values))


def test_means_of_equal_tokens_are_exact_at_any_number_of_selected_ones(inputs):
    """Equal tokens have equal scores, so the logarithm of their number is exact."""
    query, keys, values = inputs
    for rows in (keys, values):
        rows[:, 4:41] = rows[:, 4:5]
    for held in (10, 14, 20):  # 10 means of up to 4, and 0, 4 and 10 tokens
        attended = script.attend_selected(query, keys, values, 1.0, CANDIDATES, held, 4)
        torch.testing.assert_close(attended, full(query, keys, values))
    without = script.attend_selected(query, keys, values, 1.0, CANDIDATES, 10, 0)
    assert not torch.allclose(without, full(query, keys, values))


def test_means_take_room_from_selected_tokens(inputs):
    """Only one token has a value, so the output shows whether it is selected."""
    query, keys, _ = inputs
    values = torch.zeros(HEADS, TOKENS, DIM)
    values[:, 10] = 1
    keys[:, 10] += 50 * query.view(HEADS, GROUP, DIM).mean(1)

    def share(held: int, chunk: int) -> torch.Tensor:
        return script.attend_selected(
            query, keys, values, 1.0, CANDIDATES, held, chunk
        )[:, 0]

    assert share(1, 0).min() > 0.9
    assert share(0, 0).max() == 0
    assert share(2, len(CANDIDATES)).min() > 0.9, "a mean and a token"
    assert share(1, len(CANDIDATES)).max() <= 1 / len(CANDIDATES), "a mean"
    with pytest.raises(ValueError, match="2 means"):
        share(1, 20)


def test_rows_of_other_settings_are_not_continued(tmp_path):
    rows = tmp_path / "rows.jsonl"
    assert script._rows_of(rows, {"held": 120}) == []
    rows.write_text('{"held": 120, "score": 1.0}\n')
    assert len(script._rows_of(rows, {"held": 120})) == 1
    with pytest.raises(typer.BadParameter, match="--out"):
        script._rows_of(rows, {"held": 60})


def test_a_report_pairs_samples():
    rows = [
        {"task": "t", "sample": str(i), "chunk": chunk, "score": score}
        for i, scores in enumerate([(0.1, 0.4), (0.3, 0.5), (0.2, 0.2)])
        for chunk, score in zip((0, 32), scores, strict=True)
    ]
    lines = script.report(rows).splitlines()
    assert lines[2] == "| t | 0 | 3 | 0.20 |  |"
    assert lines[3].startswith("| t | 32 | 3 | 0.37 | +0.17 (")
    equal = [row | {"score": 1.0} for row in rows]
    assert script.report(equal).splitlines()[3] == "| t | 32 | 3 | 1.00 | +0.00 |"
