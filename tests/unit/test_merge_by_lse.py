"""Two partial attentions become the attention to all that they saw."""

from __future__ import annotations

import pytest
import torch

from vllm_kvplugins import ops

SEED = 20261122


def attend(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


@pytest.mark.parametrize("shift", [0.0, 300.0, -300.0])
@pytest.mark.parametrize("cut", [1, 40, 99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_one_softmax(dtype, cut, shift):
    """Also where one side outweighs the other by far."""
    print("seed", SEED)
    rng = torch.Generator().manual_seed(SEED)
    scores = 4 * torch.randn(3, 5, 100, generator=rng, dtype=torch.float64)
    scores[..., :cut] += shift
    values = torch.randn(3, 100, 16, generator=rng, dtype=torch.float64)
    first = attend(scores[..., :cut], values[:, :cut])
    second = attend(scores[..., cut:], values[:, cut:])
    right, right_lse = attend(scores, values)
    for one, other in ((first, second), (second, first)):
        out, lse = ops.merge_by_lse(
            one[0].to(dtype), one[1].float(), other[0].to(dtype), other[1].float()
        )
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        # Log-sum-exps near 300 are known to 3e-5, and so are the shares.
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(out.double(), right, rtol=0, atol=tolerance)
        torch.testing.assert_close(lse.double(), right_lse, rtol=1e-6, atol=1e-6)


def test_the_output_of_nothing_is_ignored():
    nothing, some = torch.full((2, 4), torch.nan), torch.ones(2, 4)
    none, lse = torch.full((2,), -torch.inf), torch.tensor([3.0, -3.0])
    for sides in ((nothing, none, some, lse), (some, lse, nothing, none)):
        out, merged = ops.merge_by_lse(*sides)
        assert torch.equal(out, some)
        assert torch.equal(merged, lse)
    out, merged = ops.merge_by_lse(nothing, none, nothing, none)
    assert not out.any()
    assert merged.eq(-torch.inf).all()


def test_shapes_that_do_not_fit():
    some, lse = torch.ones(1, 4), torch.ones(1)
    with pytest.raises(ValueError, match=r"one shape, got \[1, 4\] and \[4\]"):
        ops.merge_by_lse(some, lse, some[0], lse)
    with pytest.raises(ValueError, match=r"shape \[1\], got \[\]"):
        ops.merge_by_lse(some, lse, some, lse[0])
