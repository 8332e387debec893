"""The policy contract: what wrappers forward, and which names are refused."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from vllm_kvplugins.budgets import Pyramid
from vllm_kvplugins.config import KernelSettings, PrefixSettings, parse_policy
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import ResidencyPlan
from vllm_kvplugins.policies import registry
from vllm_kvplugins.policies.base import KVCachePolicy, contract_hooks
from vllm_kvplugins.policies.capabilities import Observation, Trigger, Turns
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.policies.hook_names import REMOVED_HOOKS, RESERVED_SETTINGS
from vllm_kvplugins.policies.wrapper import Wrapper
from vllm_kvplugins.sessions.settings import DEPRECATED_SETTINGS, SESSION_SETTINGS

GEOMETRY = Geometry(16, 2, 2, 1024)
REASON = "only models with two layers"


class Plain(Wrapper):
    """A wrapper that overrides only what it must."""

    name: ClassVar[str] = "plain-wrapper"
    summary: ClassVar[str] = "for tests"
    instead: ClassVar[str] = "nothing"

    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        return ResidencyPlan(geometry.block_size)


class NoObservation(Observation):
    triggers = Trigger.PREFILL_CHUNK

    def observe(self, view):
        return None


class NoTurns(Turns):
    def turn_ends(self, prompt, requested):
        return (1,)


class Unusual(Compressor):
    """A compressor whose every hook differs from the default."""

    name: ClassVar[str] = "unusual"
    summary: ClassVar[str] = "for tests"

    queries_needed: ClassVar[Any] = 7
    scores_heads_separately: ClassVar[Any] = True
    needs_rotary: ClassVar[Any] = True
    needs_output_weights: ClassVar[Any] = True
    applies_softcap: ClassVar[Any] = True
    minimum_budget_tokens: ClassVar[Any] = 9
    remarks: ClassVar[Any] = ["a remark"]
    observation: ClassVar[Any] = NoObservation()
    probing: ClassVar[Any] = "probing"
    turns: ClassVar[Any] = NoTurns()
    episode_routing: ClassVar[Any] = "routing"
    retrieval: ClassVar[Any] = "retrieval"
    spans: ClassVar[Any] = "spans"

    def score(self, view):
        return f"score of {view}"

    def page_allocator(self):
        return Pyramid()

    def problems(self):
        return ["a problem"]

    def model_problems(self, model):
        return [REASON]


@pytest.fixture
def unusual(monkeypatch):
    """``unusual`` as a policy of the registry."""
    monkeypatch.setitem(registry._POLICIES, "unusual", f"{__name__}:Unusual")


# Hooks that a wrapper decides itself, or whose answer it changes; tested below.
OWN = {
    "plan",
    "max_prompt_blocks",
    "with_allocator",
    "problems",
    "model_problems",
    "remarks",
}
ARGUMENTS: dict[str, tuple[Any, ...]] = {"score": ("view",), "page_allocator": ()}


@pytest.mark.parametrize("hook", contract_hooks())
def test_a_wrapper_forwards_each_hook_or_overrides_it(hook, unusual):
    wrapper, base = Plain(base="unusual"), Unusual()
    if hook in OWN:
        assert hook in {*vars(Wrapper), *vars(Plain)}
        return
    answers = [getattr(policy, hook) for policy in (wrapper, base)]
    if callable(vars(KVCachePolicy)[hook]):
        answers = [answer(*ARGUMENTS[hook]) for answer in answers]
    assert answers[0] == answers[1]
    default = vars(KVCachePolicy)[hook]
    if isinstance(default, property):
        assert answers[0] != default.fget(base), "the base class's answer tells nothing"


def test_the_contract_is_small():
    hooks = contract_hooks()
    assert set(hooks) >= {"plan", "score", "queries_needed", "observation", "spans"}
    assert len(hooks) <= 20, hooks


def test_a_wrapper_names_the_compressor_whose_problem_it_reports(unusual):
    wrapper = Plain(base="unusual")
    assert wrapper.problems() == ["unusual: a problem"]
    assert wrapper.model_problems(lambda: None) == [f"unusual: {REASON}"]
    assert wrapper.remarks == ["unusual: a remark"]


def test_a_wrapper_does_not_use_the_compressor_s_plan(unusual):
    wrapper = Plain(base="snapkv")
    assert parse_policy({"name": "snapkv", "prefill_block": 128}).max_prompt_blocks(
        999, GEOMETRY
    )
    assert wrapper.max_prompt_blocks(999, GEOMETRY) is None


@pytest.mark.parametrize("name", ["flowkv", "epicache"])
def test_a_compressor_that_refuses_a_model_is_refused_inside_a_wrapper(name, unusual):
    policy = registry.get_policy_class(name).model_validate({"base": "unusual"})
    assert policy.model_problems(lambda: None) == [f"unusual: {REASON}"]


def policy_with(name: str, value: Any) -> type:
    return type("Old", (Compressor,), {name: value, "__module__": __name__})


@pytest.mark.parametrize("name", REMOVED_HOOKS)
def test_hooks_of_earlier_versions_are_refused(name):
    for value in (property(lambda self: True), lambda self, *args: None):
        with pytest.raises(KVPolicyError) as caught:
            policy_with(name, value)
        assert caught.value.codes == ("KVP106",)
        assert REMOVED_HOOKS[name] in str(caught.value)


def test_settings_must_not_be_named_like_hooks():
    with pytest.raises(KVPolicyError) as caught:

        class Shadowing(Compressor):
            turns: int = 3

    assert caught.value.codes == ("KVP107",)


@pytest.mark.parametrize("name", ["kernel", "sessions"])
def test_settings_must_not_be_named_like_those_of_the_engine(name):
    fields = {"__annotations__": {name: int}, name: 3, "__module__": __name__}
    with pytest.raises(KVPolicyError) as caught:
        type("Shadowing", (Compressor,), fields)
    assert caught.value.codes == ("KVP107",)


def test_reserved_settings_are_those_that_the_engine_takes():
    reserved = {"name", *KernelSettings.model_fields, *PrefixSettings.model_fields}
    reserved |= {*SESSION_SETTINGS, *DEPRECATED_SETTINGS}
    assert reserved == RESERVED_SETTINGS


def test_removed_names_are_not_names_of_the_contract():
    assert not set(REMOVED_HOOKS) & set(dir(KVCachePolicy))
