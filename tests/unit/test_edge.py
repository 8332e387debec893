"""Streaming input is refused to the client that asks for it, and to nobody else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

vllm = pytest.importorskip("vllm")


def processor(config):
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_kvplugins.vllm_adapter.frontend import request_validation

    request_validation.install()
    bare = InputProcessor.__new__(InputProcessor)
    bare.vllm_config = SimpleNamespace(
        additional_config=config, kv_transfer_config=None
    )
    return bare


def ask(bare, **options):
    return bare.process_inputs("id", {"prompt_token_ids": [1]}, None, (), **options)


def test_streaming_input_under_a_policy_is_refused():
    from vllm.exceptions import VLLMValidationError

    bare = processor({"kv_policy": {"name": "snapkv"}})
    with pytest.raises(VLLMValidationError, match=r"streaming input.*snapkv"):
        ask(bare, resumable=True)


@pytest.mark.parametrize(
    ("config", "resumable"), [({}, True), ({"kv_policy": {"name": "snapkv"}}, False)]
)
def test_everything_else_goes_on_to_vllm(config, resumable, monkeypatch):
    """It reaches vLLM's own validation, which is what then complains."""
    bare = processor(config)
    reached = []
    monkeypatch.setattr(
        type(bare), "_validate_params", lambda *a: reached.append(a) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        ask(bare, resumable=resumable)
    assert reached


def test_requests_neither_parse_the_policy_again_nor_read_a_file(monkeypatch):
    """SeKV reads its router when it is parsed, which took 77 ms per request."""
    from vllm_kvplugins.vllm_adapter.config import engine_config

    bare = processor({"kv_policy": {"name": "sekv", "budget": 0.11}})
    parsed = []

    def counted(request):
        parsed.append(request)
        return parse_policy(request)

    parse_policy = engine_config.parse_policy
    monkeypatch.setattr(engine_config, "parse_policy", counted)
    monkeypatch.setattr(type(bare), "_validate_params", lambda *a: 1 / 0)
    for _ in range(20):
        with pytest.raises(ZeroDivisionError):
            ask(bare)
    assert len(parsed) == 1
    bare.vllm_config.additional_config = {"kv_policy": {"name": "snapkv"}}
    assert engine_config.policy_of(bare.vllm_config).name == "snapkv"
