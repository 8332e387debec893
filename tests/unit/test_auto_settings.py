"""``auto``: its settings, what it passes on, and that it is no policy."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import vllm_kvplugins
from vllm_kvplugins.choice.requests import Workload
from vllm_kvplugins.cli import app
from vllm_kvplugins.config import is_auto, parse_auto, parse_policy
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.policies.registry import (
    available_policies,
    get_policy_class,
    register_policy,
)


def codes_of(request: object) -> tuple[str, ...]:
    with pytest.raises(KVPolicyError) as caught:
        parse_auto(request)
    return caught.value.codes


def test_its_own_settings_and_those_for_any_policy_are_told_apart():
    settings, passed = parse_auto(
        {
            "name": "auto",
            "workload": "chat",
            "context": 4000,
            "host_memory": "2GiB",
            "sessions": True,
            "kernel": "triton",
            "shared_prefix": 64,
        }
    )
    assert settings.workload is Workload.CHAT
    assert (settings.context, settings.host_memory) == (4000, 2 << 30)
    assert passed == {"sessions": True, "kernel": "triton", "shared_prefix": 64}


@pytest.mark.parametrize(
    "setting", [{"budget": 512}, {"host_dtype": "int8"}, {"prefill_block": 256}]
)
def test_settings_of_a_policy_are_refused(setting):
    assert codes_of({"name": "auto", **setting}) == ("KVP051",)


def test_all_reasons_are_listed():
    wrong = {
        "name": "auto",
        "budget": 1,
        "workload": "book",
        "session_memory": "2 gigs",
    }
    assert sorted(codes_of(wrong)) == ["KVP037", "KVP037", "KVP051"]
    assert codes_of({"name": "auto", "min_score": 2}) == ("KVP037",)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [("auto", True), ({"name": "auto"}, True), ({"name": "snapkv"}, False)],
)
def test_a_request_for_auto_is_recognized(request_, expected):
    assert is_auto(request_) is expected


def test_offline_engines_take_it_too():
    asked = vllm_kvplugins.engine_args("auto", workload="chat")
    request = asked["additional_config"]["kv_policy"]
    assert request == {"name": "auto", "workload": "chat"}
    with pytest.raises(KVPolicyError) as caught:
        vllm_kvplugins.engine_args("auto", budget=512)
    assert caught.value.codes == ("KVP051",)


def test_auto_is_no_policy():
    assert "auto" not in available_policies()
    for call in (get_policy_class, parse_policy):
        with pytest.raises(KVPolicyError) as caught:
            call("auto")
        assert caught.value.codes == ("KVP052",)
    done = CliRunner().invoke(app, ["size", "m", "--policy", "auto", "--context", "9"])
    assert codes_in(done.output) == ("KVP052",)
    with pytest.raises(KVPolicyError) as caught:
        register_policy("auto", "somewhere:Policy")
    assert caught.value.codes == ("KVP102",)
