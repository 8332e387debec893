"""The kind of a policy follows from what it can do, not from its name."""

from __future__ import annotations

import pytest

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.policies import PolicyKind, available_policies, kind_of


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        ("snapkv", PolicyKind.EVICTION),
        ("kvzip", PolicyKind.EVICTION),
        ("full", PolicyKind.FULL),
        ("flowkv", PolicyKind.TURNS),
        ({"name": "flowkv", "base": "infinipot"}, PolicyKind.TURNS),
        ("epicache", PolicyKind.EPISODES),
        ({"name": "epicache", "base": "snapkv"}, PolicyKind.EPISODES),
        ("icecache", PolicyKind.RETRIEVAL),
        ("sekv", PolicyKind.SPANS),
    ],
)
def test_kinds(request_, kind):
    assert kind_of(parse_policy(request_)) is kind


def test_every_policy_has_a_kind():
    kinds = {kind_of(parse_policy(name)) for name in available_policies()}
    assert kinds == set(PolicyKind)
