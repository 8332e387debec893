"""Made-up caches find what breaks the contract, and nothing where it is kept."""

from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from typer.testing import CliRunner

from vllm_kvplugins.cli.app import app
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.policies import Compressor, available_policies
from vllm_kvplugins.policies.base import LayerView, Trigger
from vllm_kvplugins.testing import contract_check

SEED = 7


class Toy(Compressor):
    name: ClassVar[str] = "toy"
    summary: ClassVar[str] = "newest tokens, as it should be"

    def score(self, view: LayerView) -> torch.Tensor:
        return view.positions.float()


class OneTooFew(Toy):
    def score(self, view):
        return view.positions.float()[:, 1:]


class NotANumber(Toy):
    def score(self, view):
        return view.keys.float().norm(dim=-1).log().mul(0).div(0)


class Unsteady(Toy):
    def score(self, view):
        return torch.rand(view.positions.shape)


class Neighbours(Toy):
    """Its mean over all slots takes in those without a token."""

    def score(self, view):
        norms = view.keys.float().norm(dim=-1)
        return norms - norms.mean(1, keepdim=True)


class Writes(Toy):
    def score(self, view):
        return view.keys.mul_(2).float().norm(dim=-1)


class Greedy(Toy):
    def score(self, view):
        scores = view.positions.float()
        return scores.masked_fill(view.positions > 10, torch.inf)


class Stingy(Toy):
    def score(self, view):
        scores = view.positions.float()
        return scores.masked_fill(view.positions > 10, -torch.inf)


class Flat(Toy):
    def score(self, view):
        return torch.zeros(view.positions.shape)


class Raises(Toy):
    def score(self, view):
        return view.keys @ view.values


class Remembers(Toy):
    """What it observed cannot be stored as a tensor."""

    @property
    def observes(self):
        return Trigger.PREFILL_CHUNK

    def observe(self, view):
        return [float(view.positions.max())]


BROKEN = {
    OneTooFew: "must be a tensor of floats",
    NotANumber: "NaN for a token",
    Unsteady: "another one when asked again",
    Neighbours: "slots without a token changes scores",
    Writes: "score changed keys",
    Greedy: "must stay (inf) at a budget of",
    Stingy: "may stay (not -inf)",
    Flat: "have one score",
    Raises: "RuntimeError",
    Remembers: "write pack_observed",
}


@pytest.mark.parametrize("policy", BROKEN, ids=lambda p: p.__name__)
def test_what_breaks_the_contract_is_named(policy):
    found = contract_check.try_policy(policy(), SEED)
    assert any(BROKEN[policy] in finding.problem for finding in found), found


def test_a_policy_that_keeps_it_is_not_blamed():
    assert contract_check.try_policy(Toy(), SEED) == []
    assert contract_check.score_ms(Toy(), SEED, repeats=1) > 0


def test_neighbours_are_blamed_where_there_are_slots_without_a_token():
    (finding,) = contract_check.try_policy(Neighbours(), SEED)
    assert finding.shape == "KV heads of unlike length"


@pytest.mark.parametrize("name", available_policies())
def test_our_policies_keep_it(name):
    print("seed", SEED)
    policy = parse_policy({"name": name})
    if contract_check.untried(policy) is None:
        assert contract_check.try_policy(policy, SEED) == []
    else:
        with pytest.raises(KVPolicyError, match=name):
            contract_check.try_policy(policy, SEED)


def test_most_of_our_compressors_can_be_tried():
    tried = {
        n for n in available_policies() if not contract_check.untried(parse_policy(n))
    }
    assert {"snapkv", "h2o", "tova", "expected-attention", "protokv"} <= tried


def test_views_have_room_for_what_a_policy_asks_for():
    policy = parse_policy({"name": "snapkv", "window": 300, "budget": 512})
    assert contract_check.try_policy(policy, SEED) == []


def test_the_command_says_what_it_found():
    done = CliRunner().invoke(app, ["check-policy", "--policy", "snapkv"])
    assert done.exit_code == 0, done.output
    assert done.output.count("ok  ") == len(contract_check.SHAPES)
    assert "ms per layer" in done.output
    done = CliRunner().invoke(app, ["check-policy", "--policy", "kvzip"])
    assert done.exit_code == 1


def test_the_command_fails_for_a_broken_policy(monkeypatch):
    monkeypatch.setattr("vllm_kvplugins.config.parse_policy", lambda request: Flat())
    done = CliRunner().invoke(app, ["check-policy", "--policy", "snapkv"])
    assert done.exit_code == 1
    assert done.output.count("problem  ") == len(contract_check.SHAPES)
    assert "have one score" in done.output


def test_neither_a_model_nor_vllm_is_loaded():
    code = (
        "import sys; from vllm_kvplugins.testing import contract_check;"
        "from vllm_kvplugins.config import parse_policy;"
        "contract_check.try_policy(parse_policy('snapkv'));"
        "print([m for m in ('vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
