"""ArkVale's estimates against loops over pages and keys."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.index import Keys
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.arkvale import Bound, PageVolumes
from vllm_kvplugins.policies.pages import OrderedPages
from vllm_kvplugins.policies.quest import PageBounds

SEED = 11
HEADS, GROUP, DIM, PAGE, TOKENS = 2, 3, 8, 5, 43
BOUNDS = get_args(Bound)


def random_keys(seed: int = SEED) -> torch.Tensor:
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    return 1 + 2 * torch.randn(HEADS, TOKENS, DIM, generator=generator)


def random_queries() -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED + 1)
    return torch.randn(HEADS, GROUP, DIM, generator=generator)


def make(kind: str) -> OrderedPages:
    if kind == "quest":
        return PageBounds(HEADS, DIM, PAGE)
    return PageVolumes(HEADS, DIM, PAGE, kind)  # type: ignore[arg-type]


def pages_of(keys: torch.Tensor) -> list[torch.Tensor]:
    """Keys of one head [tokens, dim] in runs of PAGE tokens; the last run is
    partial.
    """
    return [keys[start : start + PAGE] for start in range(0, len(keys), PAGE)]


def estimate(bound: str, query: torch.Tensor, page: torch.Tensor) -> float:
    """Section 5.2 of the paper for one query and one page."""
    volume, kind = bound.split("-")
    corners = torch.stack([page.min(0).values, page.max(0).values])
    centre = corners.mean(0)
    if volume == "sphere":
        lengths = [float((centre - key).norm()) for key in page]
        radius = {
            "max": max(lengths),
            "center": (min(lengths) + max(lengths)) / 2,
            "mean": sum(lengths) / len(lengths),
        }[kind]
        return float(query @ centre + radius * query.norm())
    total = 0.0
    for channel in range(DIM):
        distances = [abs(float(centre[channel] - key[channel])) for key in page]
        radius = {
            "max": max(distances),
            "center": (min(distances) + max(distances)) / 2,
            "mean": sum(distances) / len(distances),
        }[kind]
        ends = (float(centre[channel]) + radius, float(centre[channel]) - radius)
        total += max(float(query[channel]) * end for end in ends)
    return total


@pytest.mark.parametrize("bound", BOUNDS)
def test_estimates_are_those_of_the_paper(bound):
    keys, queries = random_keys(), random_queries()
    index = make(bound)
    index.append(keys, 0)
    bounds = index.upper_bounds(queries)
    assert bounds.shape == (HEADS, GROUP, 9)
    for head in range(HEADS):
        for number, page in enumerate(pages_of(keys[head])):
            for member in range(GROUP):
                expected = estimate(bound, queries[head, member], page)
                assert float(bounds[head, member, number]) == pytest.approx(
                    expected, rel=1e-4, abs=1e-4
                )


@pytest.mark.parametrize("kind", ["quest", "cuboid-max", "sphere-max"])
def test_what_encloses_all_keys_bounds_them(kind):
    keys, queries = random_keys(), random_queries()
    index = make(kind)
    index.append(keys, 0)
    bounds = index.upper_bounds(queries)
    products = queries @ keys.transpose(1, 2)
    for number in range(9):
        inside = products[..., number * PAGE : (number + 1) * PAGE]
        assert (bounds[..., number] >= inside.amax(-1) - 1e-4).all()


def test_the_largest_cuboid_is_quest_s_bound():
    keys, queries = random_keys(), random_queries()
    indices = make("quest"), make("cuboid-max")
    for index in indices:
        index.append(keys, 0)
    quest, arkvale = (index.upper_bounds(queries) for index in indices)
    torch.testing.assert_close(quest, arkvale)


@pytest.mark.parametrize("bound", BOUNDS)
def test_smaller_radii_promise_less(bound):
    keys, queries = random_keys(), random_queries()
    largest = make(bound.split("-")[0] + "-max")
    index = make(bound)
    for each in (index, largest):
        each.append(keys, 0)
    assert (index.upper_bounds(queries) <= largest.upper_bounds(queries) + 1e-4).all()


@pytest.mark.parametrize("kind", ["quest", *BOUNDS])
def test_portions_do_not_matter(kind):
    keys, queries = random_keys(), random_queries()
    whole, parts = make(kind), make(kind)
    whole.append(keys, 0)
    for first, stop in ((0, 3), (3, 4), (4, 5), (5, 16), (16, 30), (30, 43)):
        parts.append(keys[:, first:stop], first)
    for one, other in zip(whole._digests, parts._digests, strict=True):
        assert torch.equal(one, other)
    selected = [i.select(queries, Keys.dense(keys), 0.3, 17) for i in (whole, parts)]
    assert torch.equal(*selected)


@pytest.mark.parametrize("kind", ["quest", *BOUNDS])
def test_a_page_of_one_key_promises_its_product(kind):
    keys, queries = random_keys()[:, :1], random_queries()
    index = make(kind)
    index.append(keys, 0)
    selected = index.upper_bounds(queries)
    torch.testing.assert_close(selected, queries @ keys.transpose(1, 2))


@pytest.mark.parametrize("bound", ["cuboid-mean", "sphere-center"])
def test_the_best_pages_come_first(bound):
    keys, queries = random_keys(), random_queries()
    index = make(bound)
    index.append(keys.bfloat16(), 0)
    keys = keys.bfloat16().float()
    selected = index.select(queries, Keys.dense(keys), 0.3, 2 * PAGE + 2)
    for head in range(HEADS):
        worth = torch.zeros(9)
        for member in range(GROUP):
            promised = [
                estimate(bound, queries[head, member], page)
                for page in pages_of(keys[head])
            ]
            worth += (0.3 * torch.tensor(promised)).softmax(0)
        order = worth.argsort(descending=True).tolist()
        tokens = [page * PAGE + slot for page in order for slot in range(PAGE)]
        expected = [token for token in tokens if token < TOKENS][: 2 * PAGE + 2]
        assert selected[head].tolist() == expected


def test_more_than_there_is():
    keys = random_keys()
    index = make("cuboid-mean")
    index.append(keys, 0)
    selected = index.select(random_queries(), Keys.dense(keys), 0.3, TOKENS + 2)
    assert selected[:, TOKENS:].eq(-1).all()
    ordered = selected[:, :TOKENS].sort().values
    assert ordered.equal(torch.arange(TOKENS).expand(HEADS, -1))


@pytest.mark.parametrize("request_", [{"name": "quest"}, {"name": "arkvale"}])
@pytest.mark.parametrize("page_tokens", [1, 7, 32])
def test_host_memory_counts_the_digests(request_, page_tokens):
    policy: Any = parse_policy(
        {**request_, "page_tokens": page_tokens, "skip_layers": 0}
    )
    exact: Any = parse_policy({"name": "exact-topk", "skip_layers": 0})
    # one layer of bfloat16 keys and values
    shape = Geometry(16, 1, HEADS, kv_bytes_per_token=2 * 2 * HEADS * DIM)
    offloaded = 400
    tokens = offloaded + policy.sinks + policy.window
    index = policy.new_index(HEADS, DIM)
    index.append(torch.zeros(HEADS, offloaded, DIM), 0)
    stored_bytes = sum(part.nbytes for part in index._digests)
    more = policy.host_bytes(tokens, shape) - exact.host_bytes(tokens, shape)
    assert stored_bytes <= more + 8 * HEADS * DIM
    assert more <= 1.1 * stored_bytes


def test_unknown_selected_are_refused():
    with pytest.raises(KVPolicyError, match="bound"):
        parse_policy({"name": "arkvale", "bound": "cuboid-median"})
