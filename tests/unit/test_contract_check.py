"""``check-policy`` names each violation of the contract and accepts sound policies."""

from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from typer.testing import CliRunner

from vllm_kvplugins.cli.app import app
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.policies import Compressor, available_policies
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.capabilities import Observation, Trigger
from vllm_kvplugins.testing import contract_check

SEED = 7


class Toy(Compressor):
    name: ClassVar[str] = "toy"
    summary: ClassVar[str] = "newest tokens; keeps the contract"

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
    """The mean over all slots includes slots without a token."""

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


class Means(Toy):
    @property
    def scores_heads_separately(self):
        return True

    def score(self, view):
        return (
            super()
            .score(view)
            .nan_to_num()
            .mean(0, keepdim=True)
            .expand(view.positions.shape)
        )


class SmallMeans(Means):
    """Scores as small as the attention to one of many tokens."""

    def score(self, view):
        return super().score(view) * 1e-9


class ListObservation(Observation):
    """Returns a list, which ``pack`` cannot turn into tensors."""

    triggers = Trigger.PREFILL_CHUNK

    def observe(self, view):
        return [float(view.positions.max())]


class Unpackable(Toy):
    @property
    def observation(self):
        return ListObservation()


BROKEN = {
    OneTooFew: None,  # the engine's own message
    NotANumber: "KVP134",
    Unsteady: "KVP135",
    Neighbours: "KVP136",
    Writes: "KVP133",
    Greedy: "KVP137",
    Stingy: "KVP137",
    Flat: "KVP139",
    Raises: "KVP132",
    Means: "KVP129",
    SmallMeans: "KVP129",
    Unpackable: "KVP138",
}


@pytest.mark.parametrize("policy", BROKEN, ids=lambda p: p.__name__)
def test_each_violation_is_named(policy):
    findings = contract_check.check_contract(policy(), SEED)
    if BROKEN[policy] is None:
        assert findings
    else:
        codes = {code for f in findings for code in codes_in(f.problem)}
        assert BROKEN[policy] in codes, findings


def test_a_sound_policy_has_no_findings():
    assert contract_check.check_contract(Toy(), SEED) == []
    assert contract_check.score_ms(Toy(), SEED, repeats=1) > 0


def test_reading_invalid_slots_shows_only_where_there_are_some():
    (finding,) = contract_check.check_contract(Neighbours(), SEED)
    assert finding.shape == "KV heads of different lengths"


@pytest.mark.parametrize("name", available_policies())
def test_policies_of_this_package_keep_the_contract(name):
    print("seed", SEED)
    policy = parse_policy({"name": name})
    if contract_check.unsupported(policy) is None:
        assert contract_check.check_contract(policy, SEED) == []
    else:
        with pytest.raises(KVPolicyError) as caught:
            contract_check.check_contract(policy, SEED)
        assert caught.value.codes in (("KVP130",), ("KVP131",))


def test_most_compressors_can_be_checked():
    supported = {
        name
        for name in available_policies()
        if not contract_check.unsupported(parse_policy(name))
    }
    assert {"snapkv", "h2o", "tova", "expected-attention", "protokv"} <= supported


def test_caches_have_room_for_a_large_window():
    policy = parse_policy({"name": "snapkv", "window": 300, "budget": 512})
    assert contract_check.check_contract(policy, SEED) == []


def test_the_command_reports_each_shape():
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
    assert set(codes_in(done.output)) == {"KVP139"}


def test_the_check_loads_neither_a_model_nor_vllm():
    code = (
        "import sys; from vllm_kvplugins.testing import contract_check;"
        "from vllm_kvplugins.config import parse_policy;"
        "contract_check.check_contract(parse_policy('snapkv'));"
        "print([m for m in ('vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
