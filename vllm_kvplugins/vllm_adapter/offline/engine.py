"""A real engine in this process for one prompt, as command-line tools need it.

In this process, so that the worker can be asked what its policy did.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvplugins.config import CONFIG_KEY, parse_policy
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.plan.geometry import Geometry

_IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Room beyond prompt and answer: vLLM's null block, rounding.
_SPARE_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that is ready for its prompt.

    Attributes:
        llm: vLLM's ``LLM``.
        prompt_token_ids: tokenized as for a completion (no chat template).
    """

    llm: Any
    tokenizer: Any
    prompt_token_ids: list[int]
    geometry: Geometry
    head_dim: int

    def generate(self, prompt_token_ids: list[int], max_tokens: int) -> list[int]:
        """The greedy answer to a prompt; ends early with the model's end of text."""
        from vllm import SamplingParams

        (done,) = self.llm.generate(
            [{"prompt_token_ids": prompt_token_ids}],
            SamplingParams(temperature=0.0, max_tokens=max_tokens),
            use_tqdm=False,
        )
        return list(done.outputs[0].token_ids)


@contextmanager
def engine(
    model: str,
    request: dict[str, Any],
    prompt: str,
    max_tokens: int,
    dtype: str = "auto",
    max_model_len: int | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Iterator[Engine]:
    """Start an engine that is just large enough, and shut it down afterwards.

    Args:
        model: a folder or a Hugging Face id.
        request: the policy as ``parse_policy`` takes it.
        prompt: text.
        max_tokens: that will be generated.
        dtype: vLLM's ``dtype``.
        max_model_len: context to run with; None = the model's, of which only
            as much as is needed is set up.
        progress: told what is being done, step by step.

    Raises:
        KVPolicyError: the policy, the model or the prompt cannot be used.

    Cost: start-up of an engine.
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
        ids = list(tokenizer.encode(prompt))
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


def _check_folder(model: str) -> None:
    """Say plainly what transformers would report as a malformed repository id."""
    path = Path(model).expanduser()
    if model.startswith(("/", ".", "~")) and not (path / "config.json").is_file():
        what = "holds no config.json" if path.is_dir() else "does not exist"
        raise KVPolicyError(
            f"the model folder {model} {what}; pass a folder with a model in Hugging "
            "Face format, or a Hugging Face id"
        )


def _check_length(
    tokens: int, answer: int, context: int, model: str, asked: int | None
) -> None:
    if tokens == 0:
        raise KVPolicyError("the prompt has no tokens; write some text into the file")
    if tokens + answer > context:
        where, remedy = f"the context of {model}, {context}", "shorten the prompt"
        if answer > 1:
            remedy += " or lower --max-tokens"
        if asked:
            where, remedy = f"--max-model-len {asked}", f"raise it or {remedy}"
        raise KVPolicyError(
            f"the prompt has {tokens} tokens and needs "
            f"{'one' if answer == 1 else answer} more to generate, which does not fit "
            f"{where}; {remedy}"
        )


def _room_for(tokens: int, context: int, geometry: Geometry) -> dict[str, int]:
    """A context and a KV cache just large enough, whatever the model's limit."""
    limit = min(context, tokens + _SPARE_TOKENS)
    slots = limit + _SPARE_TOKENS
    return {
        "max_model_len": limit,
        "kv_cache_memory_bytes": slots * geometry.kv_bytes_per_token,
    }


@contextmanager
def _refusals(title: str) -> Iterator[None]:
    """Turn what vLLM and transformers raise about a model into one message."""
    try:
        yield
    except KVPolicyError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise KVPolicyError(f"{title}: {_first_words(error)}") from error


def _first_words(error: Exception) -> str:
    """The message without pydantic's frame, at most three lines."""
    reports = getattr(error, "errors", None)
    if callable(reports):
        messages = (str(item["msg"]) for item in reports())
        return "; ".join(text.removeprefix("Value error, ") for text in messages)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:3]) or type(error).__name__


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables, and put them back afterwards."""
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
