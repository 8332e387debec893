"""Validation of requests under a policy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import codes_in

vllm = pytest.importorskip("vllm")


def processor(config):
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_kvplugins.vllm_adapter.frontend import request_validation

    request_validation.install()
    input_processor = InputProcessor.__new__(InputProcessor)
    input_processor.vllm_config = SimpleNamespace(
        additional_config=config, kv_transfer_config=None
    )
    return input_processor


def process(input_processor, **options):
    return input_processor.process_inputs(
        "id", {"prompt_token_ids": [1]}, None, (), **options
    )


def test_rejects_streaming_input():
    from vllm.exceptions import VLLMValidationError

    input_processor = processor({"kv_policy": {"name": "snapkv"}})
    with pytest.raises(VLLMValidationError) as caught:
        process(input_processor, resumable=True)
    assert codes_in(str(caught.value)) == ("KVP500",)
    assert "snapkv" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "resumable"), [({}, True), ({"kv_policy": {"name": "snapkv"}}, False)]
)
def test_passes_other_requests_to_vllm(config, resumable, monkeypatch):
    """Other errors reach vLLM's own validation."""
    input_processor = processor(config)
    reached = []
    monkeypatch.setattr(
        type(input_processor), "_validate_params", lambda *a: reached.append(a) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        process(input_processor, resumable=resumable)
    assert reached


@pytest.fixture
def validate(monkeypatch):
    """Validates a request of 1000 tokens in a context of 4096, in a pool of blocks."""
    from vllm_kvplugins.plan.geometry import Geometry
    from vllm_kvplugins.vllm_adapter.frontend import request_validation as checks

    shape = Geometry(32, num_layers=2, num_kv_heads=2, kv_bytes_per_token=1024)
    monkeypatch.setattr(checks, "geometry_of", lambda config: shape)
    monkeypatch.setattr(checks, "other_blocks", lambda config, tokens: 0)

    def validate(policy, params, pool=50, prompt=1000, seen=None):
        from vllm import SamplingParams

        monkeypatch.setattr(checks, "blocks_per_engine", lambda config: pool)
        model = SimpleNamespace(max_model_len=4096, get_vocab_size=lambda: 100)
        config = SimpleNamespace(
            model_config=model,
            scheduler_config=SimpleNamespace(async_scheduling=False),
            num_lookahead_tokens=0,
        )
        request = SimpleNamespace(
            prompt_token_ids=[1] * prompt,
            prompt_embeds=None,
            sampling_params=SamplingParams(**params),
        )
        checks._validate(config, parse_policy(policy), request)
        if seen is not None:
            seen.append(request.sampling_params)
        return request.sampling_params.max_tokens

    return validate


BOUNDED = {"name": "snapkv", "budget": 256, "prefill_block": 256}


def test_an_answer_without_a_limit_is_as_long_as_the_pool_allows(validate):
    """vLLM writes all that the context leaves into requests that name no number."""
    everything = 4096 - 1000
    # 8 of 32 blocks stay of the prompt, with 8 tokens more; the last token needs none.
    fitting = 50 * 32 - 256 - 8 + 1
    assert validate(BOUNDED, {"max_tokens": everything}) == fitting
    assert validate(BOUNDED, {"max_tokens": fitting}) == fitting
    assert validate(BOUNDED, {"max_tokens": 20}) == 20
    assert validate(BOUNDED, {"max_tokens": everything}, pool=500) == everything


@pytest.mark.parametrize(
    ("params", "pool"),
    [
        ({"max_tokens": 3000}, 50),
        ({"max_tokens": 3096, "min_tokens": 2000}, 50),
        ({"max_tokens": 3096}, 15),
    ],
    ids=["a number", "a minimum", "no room at all"],
)
def test_an_answer_that_has_no_room_is_rejected(validate, params, pool):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError) as caught:
        validate(BOUNDED, params, pool=pool)
    assert codes_in(str(caught.value)) == ("KVP502",)


@pytest.mark.parametrize("max_tokens", [20, 3096], ids=["limited", "unlimited"])
def test_a_shared_prefix_is_as_long_as_the_pool_allows(validate, max_tokens):
    """It never makes a request fail that fits without one."""
    shared = {}
    for pool in (18, 24, 30, 200):
        seen = []
        extra = {"shared_prefix": 20 * 32}
        answer = {"max_tokens": max_tokens}
        validate(BOUNDED, answer | {"extra_args": extra}, pool=pool, seen=seen)
        shared[pool] = seen[0].extra_args["shared_prefix"] // 32
        assert extra == {"shared_prefix": 640}, "other requests may have it"
        assert validate(BOUNDED, answer, pool=pool)
    # A prompt holds up to 17 blocks behind the prefix: budget, block and a partial one.
    assert shared[24] <= 24 - 17 + 1
    assert 0 <= shared[18] < shared[24] < shared[30] <= 20
    assert shared[200] == 20


def test_an_answer_without_a_limit_fits_into_host_memory(validate):
    policy = {"name": "quest", "budget": 64, "host_memory": "3MiB", "skip_layers": 0}
    from vllm.exceptions import VLLMValidationError

    limited = validate(policy, {"max_tokens": 3096}, pool=1000)
    assert 1 < limited < 3096
    assert validate(policy, {"max_tokens": limited}, pool=1000) == limited
    with pytest.raises(VLLMValidationError, match="KVP501"):
        validate(policy, {"max_tokens": limited + 1}, pool=1000)


@pytest.mark.parametrize(
    "extra",
    [
        {"turn_ends": [5] * 10**5},
        {"turn_ends": "x" * 10**6},
        {"turn_ends": [3], "patched_prompt": "y" * 10**6},
        {"turn_ends": [3], "patched_prompt": [-1] * 10**5},
        {"kv_transfer_params": "z" * 10**6},
    ],
    ids=["turn ends", "text", "long prompt", "patched prompt", "transfer"],
)
def test_errors_do_not_repeat_long_values(validate, extra):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError) as caught:
        validate("epicache", {"extra_args": extra}, pool=1000)
    assert len(str(caught.value)) < 700
    assert "more characters" in str(caught.value)


@pytest.mark.parametrize(
    "transfer", ["y", 7, [1], {"do_remote_decode": True}, None, ""]
)
def test_transfer_parameters_on_which_vllm_fails_are_rejected(validate, transfer):
    from vllm.exceptions import VLLMValidationError

    params = {"extra_args": {"kv_transfer_params": transfer, "": 1}, "max_tokens": 9}
    if not transfer or isinstance(transfer, dict):
        assert validate("snapkv", params, pool=1000) == 9
        return
    with pytest.raises(VLLMValidationError) as caught:
        validate("snapkv", params, pool=1000)
    assert codes_in(str(caught.value)) == ("KVP511",)


@pytest.mark.parametrize(
    ("choice", "sessions", "valid"),
    [
        (False, True, True),
        (False, False, True),
        (0, False, True),  # as vLLM's HTTP server passes false
        (True, True, True),
        (1, True, True),
        (True, False, False),
        (1, False, False),
        ("false", True, False),
        (0.0, True, False),
        (2, True, False),
        (None, True, False),
        ([], True, False),
        ("x" * 10**6, True, False),
    ],
)
def test_a_request_can_decline_sessions(validate, choice, sessions, valid, monkeypatch):
    from vllm.exceptions import VLLMValidationError

    from vllm_kvplugins.vllm_adapter.config.request_params import uses_sessions
    from vllm_kvplugins.vllm_adapter.frontend import request_validation as checks

    settings = {"name": "snapkv", "sessions": sessions}
    monkeypatch.setattr(checks, "request_of", lambda config: settings)
    params = {"extra_args": {"kv_session": choice}, "max_tokens": 9}
    if valid:
        assert validate("snapkv", params, pool=1000) == 9
        made = SimpleNamespace(extra_args=params["extra_args"])
        assert uses_sessions(made) == bool(choice)
        return
    with pytest.raises(VLLMValidationError) as caught:
        validate("snapkv", params, pool=1000)
    assert codes_in(str(caught.value)) == ("KVP512",)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("ttl", "sessions", "valid"),
    [
        (300, True, True),
        (0.5, True, True),
        (3600, True, True),
        (None, False, True),
        (300, False, False),
        (0, True, False),
        (-1, True, False),
        (3601, True, False),
        (float("nan"), True, False),
        (float("inf"), True, False),
        (True, True, False),
        ("300", True, False),
        ([300], True, False),
        ("x" * 10**6, True, False),
    ],
)
def test_a_request_says_how_long_its_session_is_retained(
    validate, ttl, sessions, valid, monkeypatch
):
    from vllm.exceptions import VLLMValidationError

    from vllm_kvplugins.vllm_adapter.config.request_params import requested_ttl_s
    from vllm_kvplugins.vllm_adapter.frontend import request_validation as checks

    settings = {"name": "snapkv", "sessions": sessions}
    monkeypatch.setattr(checks, "request_of", lambda config: settings)
    params = {"extra_args": {"ttl": ttl}, "max_tokens": 9}
    if valid:
        assert validate("snapkv", params, pool=1000) == 9
        assert requested_ttl_s(SimpleNamespace(extra_args={"ttl": ttl})) == ttl
        return
    with pytest.raises(VLLMValidationError) as caught:
        validate("snapkv", params, pool=1000)
    assert codes_in(str(caught.value)) == ("KVP516",)
    assert len(str(caught.value)) < 700


def test_requests_do_not_parse_the_policy_again(monkeypatch):
    """SeKV reads its router when it is parsed, which took 77 ms per request."""
    from vllm_kvplugins.vllm_adapter.config import engine_config

    input_processor = processor({"kv_policy": {"name": "sekv", "budget": 0.11}})
    parsed = []

    def counting(request):
        parsed.append(request)
        return parse_policy(request)

    parse_policy = engine_config.parse_policy
    monkeypatch.setattr(engine_config, "parse_policy", counting)
    monkeypatch.setattr(type(input_processor), "_validate_params", lambda *a: 1 / 0)
    for _ in range(20):
        with pytest.raises(ZeroDivisionError):
            process(input_processor)
    assert len(parsed) == 1
    input_processor.vllm_config.additional_config = {"kv_policy": {"name": "snapkv"}}
    assert engine_config.policy_of(input_processor.vllm_config).name == "snapkv"
