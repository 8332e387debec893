"""Streaming input is refused to the client that asks for it, and to nobody else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

vllm = pytest.importorskip("vllm")


def processor(config):
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_kvplugins.plugin import register

    register()
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
