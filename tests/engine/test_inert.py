"""Without a policy, vLLM with this plugin installed behaves as stock vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest
from harness import engine_environment, run_scenario
from texts import random_tokens
from tiny_model import VOCABULARY

pytestmark = pytest.mark.engine

SEED = 31
PROMPTS = [random_tokens(SEED + size, size, VOCABULARY) for size in (20, 200, 900)]
POLICY = {"name": "snapkv", "budget": 128, "allocator": "cross-layer"}


def test_without_a_policy_tokens_and_configuration_are_stock(tiny_model):
    print("seed", SEED)
    arguments = {"model": tiny_model, "prompts": PROMPTS}
    scenario = "scenarios_config:stock_run"
    # with an empty list, vLLM loads no plugin
    absent = run_scenario(scenario, arguments, {"VLLM_PLUGINS": ""})
    installed = run_scenario(scenario, arguments)
    assert installed == absent
    assert "kvplugins" not in str(installed)


def test_an_engine_after_one_with_a_policy_is_stock_again(tiny_model):
    print("seed", SEED)
    arguments = {"model": tiny_model, "prompts": PROMPTS}
    alone = run_scenario("scenarios_config:stock_run", arguments)
    report = run_scenario(
        "scenarios_config:policy_then_stock", {**arguments, "policy": POLICY}
    )
    for part in ("scheduler", "manager", "worker", "connector", "backends", "impls"):
        assert "kvplugins" in str(report["policy"][part]), part
        assert "kvplugins" not in str(report["stock"][part]), part
    assert report["stock"].pop("compactions") is None
    assert report["stock"] == alone
    assert report["policy"]["compactions"] == report["again"]["compactions"] == 2
    assert report["again"]["tokens"] == report["policy"]["tokens"] != alone["tokens"]


WRAPPED = """
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.renderers.base import BaseRenderer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker

classes = (
    BaseRenderer, AsyncLLM, InputProcessor, OpenAIServingChat, Scheduler, CPUWorker
)
before = {cls: dict(vars(cls)) for cls in classes}
from vllm_kvplugins.plugin import register
register()
from vllm.engine.arg_utils import EngineArgs
EngineArgs(model=MODEL, max_model_len=256).create_engine_config()
changed = [
    f"{cls.__name__}.{name}"
    for cls in classes
    for name in {**before[cls], **vars(cls)}
    if before[cls].get(name) is not vars(cls).get(name)
]
assert not changed, changed
EngineArgs(
    model=MODEL, max_model_len=256, additional_config={"kv_policy": "flowkv"}
).create_engine_config()
assert InputProcessor.process_inputs is not before[InputProcessor]["process_inputs"]
assert BaseRenderer.render_chat is not before[BaseRenderer]["render_chat"]
stream = "chat_completion_stream_generator"
assert getattr(OpenAIServingChat, stream) is not before[OpenAIServingChat][stream]
"""


def test_a_stock_server_has_no_method_of_vllm_wrapped(tiny_model):
    """Only ``EngineArgs`` is replaced, so that a policy can be configured."""
    code = f"MODEL = {tiny_model!r}\n{WRAPPED}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=engine_environment(VLLM_PLUGINS=""),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
