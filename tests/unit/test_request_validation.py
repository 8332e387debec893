"""Validation of requests under a policy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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
