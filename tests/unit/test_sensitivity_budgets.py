"""The allocator `sensitivity`: equation 10 in whole pages, and its settings."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from profiles import write_made
from pydantic import ValidationError
from tiny_model import LLAMA

from vllm_kvplugins.budgets import parse_allocator
from vllm_kvplugins.budgets.rounding import in_proportion
from vllm_kvplugins.budgets.sensitivity_profile import read_profile, shipped_profiles
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.model_config import ConfigOnlyModel
from vllm_kvplugins.vllm_adapter.config import layer_budgets

(SMOLLM2_PROFILE,) = (path for path in shipped_profiles() if "smollm2" in path.name)

SEED = 20261122
BLOCK = 8


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """Profiles that this user has measured are not found."""
    monkeypatch.delenv("KVP_MODEL_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make(tmp_path, sensitivity, **options):
    path = write_made(tmp_path / "p.json", sensitivity)
    return parse_allocator({"name": "sensitivity", "profile": path, **options})


def random_scores(generator, layers, heads, pages):
    scores = torch.rand(layers, heads, pages * BLOCK, generator=generator) ** 4
    scores[..., -BLOCK:] = torch.inf
    return scores


def everything(scores):
    return torch.full(scores.shape[:2], scores.shape[2] // BLOCK)


def pages_of(allocator, scores, pages, available=None):
    if available is None:
        available = everything(scores)
    return allocator.allocate(scores, pages, BLOCK, available)


def test_layers_get_what_equation_10_says(tmp_path):
    scores = torch.zeros(3, 2, 64 * BLOCK)
    allocator = make(tmp_path, [0.1, 0.2, 0.5], alpha=2.0)
    # squares 1, 4, 25 of 30; 3 * 2 * 10 pages
    assert pages_of(allocator, scores, 10).sum(1).tolist() == [2, 8, 50]
    allocator = make(tmp_path, [0.1, 0.2, 0.5], alpha=1.0)
    assert pages_of(allocator, scores, 10).sum(1).tolist() == [8, 15, 37]


def test_the_floor_comes_before_equation_10(tmp_path):
    scores = torch.zeros(3, 2, 64 * BLOCK)
    allocator = make(tmp_path, [0.0, 0.25, 0.75], alpha=1.0, floor=0.5)
    assert pages_of(allocator, scores, 12).sum(1).tolist() == [12, 21, 39]
    allocator = make(tmp_path, [0.0, 0.25, 0.75], alpha=1.0, floor=1.0)
    assert pages_of(allocator, scores, 12).sum(1).tolist() == [24, 24, 24]


@pytest.mark.parametrize("number", range(60))
def test_sums_bounds_and_order(tmp_path, number):
    seed = SEED + number
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    layers, heads, maximum = draw(1, 9), draw(1, 4), draw(2, 24)
    pages, alpha = draw(1, maximum), draw(0, 30) / 10
    sensitivity = torch.rand(layers, generator=generator).square()
    sensitivity[draw(0, layers - 1)] = 0.0
    allocator = make(
        tmp_path,
        sensitivity.tolist(),
        alpha=alpha,
        floor=draw(0, 10) / 10,
        heads=("uniform", "head-adaptive")[number % 2],
    )
    scores = random_scores(generator, layers, heads, maximum)
    granted = pages_of(allocator, scores, pages)
    assert int(granted.sum()) == pages * layers * heads
    assert int(granted.min()) >= 1
    assert int(granted.max()) <= maximum
    per_layer = granted.sum(1).tolist()
    order = sensitivity.argsort().tolist()
    for less, more in itertools.pairwise(order):
        if sensitivity[less] < sensitivity[more]:
            # equal shares may round differently, by one page
            wishes_differ = per_layer[less] <= per_layer[more]
            assert wishes_differ or per_layer[less] - per_layer[more] == 1


@pytest.mark.parametrize("heads", ["uniform", "head-adaptive"])
def test_rows_with_few_pages_and_much_to_keep(tmp_path, heads):
    print("seed", SEED)
    generator = torch.Generator().manual_seed(SEED)
    scores = torch.rand(4, 3, 16 * BLOCK, generator=generator)
    scores[0, :, : 5 * BLOCK] = torch.inf  # the layer that gets nothing by equation 10
    available = torch.randint(6, 17, (4, 3), generator=generator)
    place = torch.arange(16 * BLOCK)
    scores[place >= available[..., None] * BLOCK] = -torch.inf
    allocator = make(tmp_path, [0.0, 0.1, 0.2, 3.0 / 2], heads=heads)
    granted = pages_of(allocator, scores, 6, available)
    assert int(granted.sum()) == 6 * 12
    assert bool((granted <= available).all())
    assert granted[0].tolist() == [5, 5, 5]
    assert granted[3].tolist() == available[3].tolist(), "all that it has"


def test_what_one_layer_cannot_take_goes_to_the_others_in_proportion(tmp_path):
    scores = torch.zeros(3, 1, 20 * BLOCK)
    allocator = make(tmp_path, [0.1, 0.2, 1.0], alpha=1.0)
    assert pages_of(allocator, scores, 10).tolist() == [[3], [7], [20]]


def test_alpha_0_gives_equal_layers(tmp_path):
    scores = torch.zeros(3, 2, 64 * BLOCK)
    allocator = make(tmp_path, [0.0, 0.2, 0.5], alpha=0.0)
    assert pages_of(allocator, scores, 10).sum(1).tolist() == [20, 20, 20]


@pytest.mark.parametrize("sensitivity", [[0.0, 0.0, 0.0], [0.3, 0.3, 0.3]])
def test_layers_alike_get_alike(tmp_path, sensitivity):
    scores = torch.zeros(3, 2, 64 * BLOCK)
    granted = pages_of(make(tmp_path, sensitivity, heads="uniform"), scores, 10)
    assert granted.tolist() == [[10, 10]] * 3


def test_one_layer_gets_everything(tmp_path):
    for sensitivity in ([0.0], [0.4]):
        granted = pages_of(
            make(tmp_path, sensitivity), torch.zeros(1, 2, 64 * BLOCK), 10
        )
        assert int(granted.sum()) == 20


def test_tiny_sensitivities_do_not_vanish(tmp_path):
    scores = torch.zeros(2, 1, 64 * BLOCK)
    allocator = make(tmp_path, [1e-200, 2e-200], alpha=4.0)
    assert pages_of(allocator, scores, 17).sum(1).tolist() == [2, 32]


def test_heads_share_as_head_adaptive_does(tmp_path):
    print("seed", SEED)
    scores = random_scores(torch.Generator().manual_seed(SEED), 3, 4, 32)
    scores[:, 0] *= 3
    same = make(tmp_path, [0.2, 0.2, 0.2])
    expected = pages_of(parse_allocator("head-adaptive"), scores, 8)
    assert torch.equal(pages_of(same, scores, 8), expected)
    assert len(set(expected[0].tolist())) > 1
    uniform = make(tmp_path, [0.2, 0.2, 0.2], heads="uniform")
    assert pages_of(uniform, scores, 8).tolist() == [[8] * 4] * 3


def test_without_a_profile_layers_are_equal():
    scores = torch.zeros(3, 2, 64 * BLOCK)
    assert (
        pages_of(parse_allocator("sensitivity"), scores, 9).sum(1).tolist() == [18] * 3
    )


def test_in_proportion_keeps_bounds():
    weights = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    minimum, maximum = torch.tensor([2, 1, 1]), torch.tensor([9, 9, 9])
    granted = in_proportion(weights, 10, maximum, minimum)
    assert granted.tolist() == pytest.approx([2, 2, 6])
    assert in_proportion(weights, 25, maximum, minimum).tolist() == [2, 9, 9]
    assert in_proportion(0 * weights, 25, maximum, minimum).tolist() == [2, 1, 1]


# -- settings ------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"alpha": -0.1}, {"floor": 1.1}, {"heads": "pyramid"}, {"profil": None}],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ValidationError):
        parse_allocator({"name": "sensitivity", **options})


def test_a_bad_file_is_refused_when_it_is_named(tmp_path):
    with pytest.raises(KVPolicyError, match=r"no\.json.*kvplugins research calibrate"):
        parse_policy(
            {
                "name": "snapkv",
                "allocator": {
                    "name": "sensitivity",
                    "profile": str(tmp_path / "no.json"),
                },
            }
        )


def test_a_profile_with_other_layers_is_a_problem(tmp_path):
    allocator = make(tmp_path, [0.1, 0.2])
    assert allocator.problems(2, 7) == []
    (problem,) = allocator.problems(3, 2)
    assert "2 layers" in problem
    assert "has 3" in problem
    assert parse_allocator("sensitivity").problems(3, 2) == []


def fingerprint_of(**changes):
    return lambda: ConfigOnlyModel("m", "", LLAMA | changes).fingerprint()


def test_a_profile_of_another_model_is_a_problem(tmp_path):
    path = write_made(tmp_path / "p.json", [0.1, 0.2], config=LLAMA)
    allocator = parse_allocator({"name": "sensitivity", "profile": path})
    assert allocator.model_problems(fingerprint_of()) == []
    other = fingerprint_of(vocab_size=7, rope_theta=5.0)
    (problem,) = allocator.model_problems(other)
    assert "vocab_size 1000 there, 7 here" in problem
    assert "rope {'rope_type': 'default', 'rope_theta': 10000.0} there" in problem
    assert "hidden_size" not in problem


def settle(request, **changes):
    return layer_budgets.resolve_allocator(
        request, parse_policy(request), fingerprint_of(**changes)
    )


def shipped_config():
    granted = read_profile(SMOLLM2_PROFILE).fingerprint
    return {
        "architectures": [granted.architecture],
        "num_hidden_layers": granted.num_layers,
        "num_attention_heads": granted.num_heads,
        "num_key_value_heads": granted.num_kv_heads,
        "head_dim": granted.head_dim,
        "hidden_size": granted.hidden_size,
        "vocab_size": granted.vocab_size,
        "rope_theta": granted.rope["rope_theta"],
    }


@pytest.mark.parametrize("name", ["snapkv", "flowkv"])
def test_the_shipped_profile_is_settled_for_its_model(name, caplog):
    allocator = {"name": "sensitivity", "alpha": 2.0, "heads": "uniform"}
    inner = {"base": "snapkv", "base_config": {"allocator": allocator, "window": 9}}
    request = {"name": name} | (inner if name == "flowkv" else {"allocator": allocator})
    with caplog.at_level(logging.INFO, "vllm.kv_policy"):
        granted = settle(request, **shipped_config())
    policy = parse_policy(granted)
    settled = policy.page_allocator()
    assert settled.profile == SMOLLM2_PROFILE
    assert (settled.alpha, settled.heads) == (2.0, "uniform")
    assert parse_policy(request).page_allocator().profile is None, "it was not changed"
    if name == "flowkv":
        assert granted["base_config"]["window"] == 9
    (record,) = caplog.records
    assert "SmolLM2-135M-Instruct" in record.message
    assert str(SMOLLM2_PROFILE) in record.message


def test_without_a_shipped_profile_the_log_says_uniform(caplog):
    request = {"name": "snapkv", "allocator": "sensitivity"}
    with caplog.at_level(logging.INFO, "vllm.kv_policy"):
        assert settle(request) == request
    (record,) = caplog.records
    assert "no sensitivity profile of this model is shipped" in record.message
    assert "all layers get the same budget" in record.message


def test_a_model_without_a_fingerprint_gets_equal_layers_and_is_not_measured(caplog):
    """epicache asks for layer budgets by default, so they must not refuse a model."""

    def unknown():
        raise KVPolicyError(coded("KVP104", "a configuration of another kind"))

    request = {"name": "epicache"}
    with caplog.at_level(logging.INFO, "vllm.kv_policy"):
        granted = layer_budgets.resolve_allocator(
            request, parse_policy(request), unknown
        )
    settled = parse_policy(granted).page_allocator()
    assert settled.measured is None
    assert not settled.wants_calibration
    assert "a configuration of another kind" in caplog.text


def test_a_named_profile_stays(tmp_path, caplog):
    path = write_made(tmp_path / "p.json", [0.1, 0.2])
    allocator = {"name": "sensitivity", "profile": path}
    request = {"name": "snapkv", "allocator": allocator}
    with caplog.at_level(logging.INFO, "vllm.kv_policy"):
        assert settle(request, **shipped_config()) == request
    assert path in caplog.records[0].message


def test_other_allocators_ask_for_no_fingerprint(caplog):
    request = {"name": "snapkv", "allocator": "pyramid"}

    def never():
        raise AssertionError("nobody needs it")

    with caplog.at_level(logging.INFO, "vllm.kv_policy"):
        assert (
            layer_budgets.resolve_allocator(request, parse_policy(request), never)
            == request
        )
    assert parse_policy(request).page_allocator().model_problems(never) == []
    assert not caplog.records
