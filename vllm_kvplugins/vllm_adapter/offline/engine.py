"""Starts an engine for one prompt in this process, for command-line tools.

Runs the worker in this process, so that tools can read the records of its policy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvplugins import calibration_job
from vllm_kvplugins.config import CONFIG_KEY, parse_policy
from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.plan.geometry import Geometry

# An engine for one prompt ends before a measurement of its model would.
_IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", calibration_job.SWITCH: "0"}
# A text, or the messages of a chat.
Prompt = str | Sequence[dict[str, Any]]
# Tokens in addition to prompt and answer: vLLM's null block, rounding.
_SPARE_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine and its tokenized prompt.

    Attributes:
        llm: vLLM's ``LLM``.
        prompt_token_ids: a text is tokenized as for a completion (no chat template).
    """

    llm: Any
    tokenizer: Any
    prompt_token_ids: list[int]
    geometry: Geometry
    head_dim: int

    def generate(self, prompt_token_ids: list[int], max_tokens: int) -> list[int]:
        """Generate greedily; stops early at the model's end-of-text token."""
        from vllm import SamplingParams

        (output,) = self.llm.generate(
            [{"prompt_token_ids": prompt_token_ids}],
            SamplingParams(temperature=0.0, max_tokens=max_tokens),
            use_tqdm=False,
        )
        return list(output.outputs[0].token_ids)

    def chat(self, messages: Sequence[dict[str, Any]], max_tokens: int) -> None:
        """Answer a chat greedily. The front end finds the ends of its turns."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.llm.chat(list(messages), sampling, use_tqdm=False)


@contextmanager
def engine(
    model: str,
    request: dict[str, Any],
    prompt: Prompt,
    max_tokens: int,
    dtype: str = "auto",
    max_model_len: int | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Iterator[Engine]:
    """Start an engine that is just large enough; shut it down on exit.

    Args:
        model: a folder or a Hugging Face ID.
        request: the policy, in the form that ``parse_policy`` takes.
        prompt: a text, or messages, which are rendered with the chat template.
        max_tokens: maximum number of tokens to generate.
        dtype: vLLM's ``dtype``.
        max_model_len: maximum context; None: the model's. The engine allocates only
            as much as prompt and answer need.
        progress: called with a description of each step.

    Raises:
        KVPolicyError: the policy, the model or the prompt cannot be used.

    Cost: starts an engine.
    """
    parse_policy(request)
    _check_folder(model)
    options: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "enforce_eager": True,
        "max_num_seqs": 1,
        "additional_config": {CONFIG_KEY: request},
    }
    with _environment(_IN_PROCESS):
        progress("importing vLLM")
        import vllm
        from vllm.engine.arg_utils import EngineArgs

        from vllm_kvplugins.vllm_adapter.config import engine_config
        from vllm_kvplugins.vllm_adapter.startup import flags

        flags.install()
        progress("reading the model's configuration")
        with _refusals(f"vLLM cannot use {model!r}"):
            config = EngineArgs(**options).create_engine_config()
            tokenizer = _tokenizer(config.model_config)
            ids = _token_ids(tokenizer, prompt)
        context = config.model_config.max_model_len
        _check_length(len(ids), max_tokens, context, model, max_model_len)
        geometry = engine_config.geometry_of(config)
        options |= _room_for(len(ids) + max_tokens, context, geometry)
        head_dim = config.model_config.get_head_size()

        progress(f"loading {model}")
        with _refusals(f"vLLM cannot start with {model!r}"):
            llm = vllm.LLM(**options)
        try:
            yield Engine(llm, tokenizer, ids, geometry, head_dim)
        finally:
            llm.llm_engine.engine_core.shutdown()


def _tokenizer(model_config: Any) -> Any:
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config)


def _token_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    return list(
        tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, return_dict=False
        )
    )


def _check_folder(model: str) -> None:
    """Check that a path exists; transformers would report a malformed model ID."""
    path = Path(model).expanduser()
    if model.startswith(("/", ".", "~")) and not (path / "config.json").is_file():
        problem = "has no config.json" if path.is_dir() else "does not exist"
        raise KVPolicyError(
            coded(
                "KVP628",
                f"the model folder {model} {problem}; give a folder with a model in "
                "Hugging Face format, or a Hugging Face ID",
            )
        )


def _check_length(
    prompt_tokens: int,
    max_tokens: int,
    context: int,
    model: str,
    max_model_len: int | None,
) -> None:
    if prompt_tokens == 0:
        raise KVPolicyError(
            coded("KVP509", "the prompt has 0 tokens; write some text into the file")
        )
    if prompt_tokens + max_tokens > context:
        limit, remedy = f"the context of {model}, {context}", "shorten the prompt"
        if max_tokens > 1:
            remedy += " or lower --max-tokens"
        if max_model_len:
            limit, remedy = f"--max-model-len {max_model_len}", f"raise it or {remedy}"
        raise KVPolicyError(
            coded(
                "KVP509",
                f"a prompt of {prompt_tokens} tokens and an answer of up to "
                f"{max_tokens} do not fit into {limit}; {remedy}",
            )
        )


def _room_for(tokens: int, context: int, geometry: Geometry) -> dict[str, int]:
    """Engine arguments for a context and a KV cache that are just large enough."""
    limit = min(context, tokens + _SPARE_TOKENS)
    slots = limit + _SPARE_TOKENS
    return {
        "max_model_len": limit,
        "kv_cache_memory_bytes": slots * geometry.kv_bytes_per_token,
    }


@contextmanager
def _refusals(title: str) -> Iterator[None]:
    """Turn errors of vLLM and transformers about a model into a short message."""
    try:
        yield
    except KVPolicyError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise KVPolicyError(coded("KVP039", f"{title}: {_shorten(error)}")) from error


def _shorten(error: Exception) -> str:
    """Up to three lines of a message, without those that pydantic adds."""
    reports = getattr(error, "errors", None)
    if callable(reports):
        messages = (str(item["msg"]) for item in reports())
        return "; ".join(text.removeprefix("Value error, ") for text in messages)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:3]) or type(error).__name__


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables; restore them on exit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
