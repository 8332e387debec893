"""The calculations of benchmarks/kernels/index_peers.py."""

from __future__ import annotations

import importlib.util
import itertools
import math
from types import SimpleNamespace

import index_peers
import pytest
import torch
from _index_methods import LIBRARIES, K, Ours, steps
from index_peers import coverage, crossovers, tune, where
from real_keys import mass_covered

from vllm_kvplugins.index import compiled


def made(count: int = 700) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and queries of two heads, and the exact slots."""
    generator = torch.Generator().manual_seed(20261121)
    keys = torch.randn(2, count, 16, generator=generator)
    queries = torch.randn(2, 5, 16, generator=generator) * 3
    return keys, queries, (queries @ keys.transpose(1, 2)).topk(K).indices


def test_coverage_is_the_ratio_of_masses():
    keys, queries, exact = made()
    result = exact.roll(1, 0)  # slots of the other head
    result[:, :, 50:] = -1
    result[:, :, :9] = exact[:, :, :9]
    masses = [mass_covered(queries, keys, slots) for slots in (result, exact)]
    expected = (masses[0] / masses[1]).mean().item()
    assert coverage(queries, keys, result, exact) == pytest.approx(expected, rel=1e-5)
    assert coverage(queries, keys, exact, exact) == pytest.approx(1.0)


def test_the_smallest_setting_that_reaches_a_target_is_taken():
    method = SimpleNamespace(knobs=[1, 2, 4, 8])
    shares = {1: 0.5, 2: 0.96, 4: 0.955, 8: 0.97}
    chosen = tune(method, [0.95, 0.97, 0.98], shares.__getitem__)
    assert chosen == {0.95: (2, 0.96), 0.97: (8, 0.97), 0.98: (None, 0.97)}


def test_steps_grow_by_a_fourth_of_an_octave():
    result = steps(64, 1000)
    assert result[0] == 64
    assert result[-1] == 1000
    assert all(b / a < 1.2 for a, b in itertools.pairwise(result))
    assert steps(1, 5) == [1, 2, 3, 4, 5]


def test_crossovers_are_interpolated():
    sizes, gains = [4096, 16384], [math.log(0.5), math.log(2.0)]
    assert where(sizes, gains) == "from about 8,192"
    assert where(sizes, gains[::-1]) == "up to about 8,192"
    assert where(sizes, [0.1, 0.2]) == "at every length compared"
    assert where(sizes, [-0.1, -0.2]) == "at none compared"
    rows = [
        {"method": method, "target": target, "keys": size, "query_us_cpu": [time]}
        for method, target, size, time in [
            ("tree float32", 0.95, 4096, 2.0),
            ("scan float32", 0.0, 4096, 3.0),
            ("scan bfloat16", 0.0, 4096, 1.0),
            ("hnswlib", 0.95, 4096, 1.0),
            ("hnswlib", 0.98, 4096, 9.0),
        ]
    ]
    result = [(line["other"], line["ratios"][4096]) for line in crossovers(rows)]
    assert result == [("scan float32", 1.5), ("hnswlib", 0.5)]


METHODS = [
    *((kind, "") for kind in Ours.kinds),
    *((kind.name, module) for module, kinds in LIBRARIES.items() for kind in kinds),
]


@pytest.mark.parametrize(("kind", "library"), METHODS)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_method_finds_all_when_it_looks_at_all(kind, library, threads):
    if kind in ("tree", "codes") and compiled.extension_problem():
        pytest.skip("the extension is not built")
    keys, queries, exact = made()
    if not library:
        method = Ours(kind, keys, torch.float32)
    else:
        module = pytest.importorskip(library)
        (made_by,) = (each for each in LIBRARIES[library] if each.name == kind)
        method = made_by(keys, module, threads)
    method.build()
    method.ready()
    result = method.ask(method.prepared(queries), method.knobs[-1])
    assert result.dtype == torch.int64
    assert result.shape == exact.shape
    codes = kind == "codes" or library == "scann" or "fast-scan" in kind
    enough = 0.999 if codes else 0.9999  # codes round
    assert coverage(queries, keys, result, exact) > enough


def test_missing_libraries_are_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert index_peers.libraries() == {}
    assert "pip install faiss-cpu" in capsys.readouterr().err
