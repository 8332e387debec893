"""One engine of ``evidence.py``: answers, divergences and speed of one policy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from _evidence_samples import FORCED_TOKENS, KL, Prompt, reference_file
from _quality_engine import Held, ResidencyWatch, open_engine, row_of
from _quality_samples import Setting
from vllm.v1.sample.logits_processor import LogitsProcessor

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.base import KVCachePolicy

SPEED = "speed"
SPEED_TOKENS = 32
SPEED_ROUNDS = 3
Row = dict[str, Any]


class ForcedTokens(LogitsProcessor):
    """Forces one request's answer, and records the log-probabilities of each token.

    The engine runs one request at a time while tokens are forced. vLLM also samples,
    and discards, a token after each chunk of the prompt; the number of output tokens
    tells which token is due.
    """

    tokens: ClassVar[Sequence[int]] = ()
    recorded: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self, *unused: Any) -> None:
        """vLLM passes its configuration, the device and whether memory is pinned."""
        self._output: Sequence[int] = ()

    @classmethod
    def start(cls, tokens: Sequence[int]) -> None:
        """Force these tokens from the next step on."""
        cls.tokens, cls.recorded = tokens, {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the output of the newest request, a list that vLLM extends."""
        for _, _, _, output in batch_update.added if batch_update else ():
            self._output = output

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        step = len(self._output)
        if step >= len(self.tokens):
            return logits
        assert len(logits) == 1, "forced tokens need a request alone"
        self.recorded[step] = logits[0].float().log_softmax(-1).clone()
        logits.fill_(-torch.inf)
        logits[0, self.tokens[step]] = 0.0
        return logits


def measure_policy(
    setting: Setting,
    policy: Mapping[str, Any],
    prompts: Sequence[Prompt],
    max_model_len: int,
    batch: int,
    references: Path,
    speed: bool,
) -> Iterator[Row]:
    """One row per prompt, then one per round of the speed measurement.

    Args:
        prompts: that have no row yet.
        references: folder of stock's log-probabilities; stock writes them.
        speed: whether to measure speed too.

    Cost: start-up of an engine, and the answers.
    """
    llm = open_engine(
        setting, policy, max_model_len, batch, logits_processors=[ForcedTokens]
    )
    parsed = parse_policy(dict(policy)) if policy else None
    watch = ResidencyWatch(llm)
    host = _HostBytes(parsed, llm)
    questions = [prompt for prompt in prompts if not prompt.forced]
    for first in range(0, len(questions), batch):
        part = questions[first : first + batch]
        outputs = _generate(llm, parsed, part)
        for prompt, output in zip(part, outputs, strict=True):
            assert prompt.sample is not None
            held = watch.held.pop(output.request_id, Held())
            row = row_of(prompt.sample, output, held)
            yield row | host.of(len(prompt.token_ids), prompt.sample.max_tokens)
    for prompt in prompts:
        if prompt.forced:
            yield _divergence(llm, parsed, prompt, watch, references) | host.of(
                len(prompt.token_ids), FORCED_TOKENS
            )
    if speed:
        yield from _speed(llm, parsed, prompts[0])


class _HostBytes:
    """Host memory that the engine reserves for a request."""

    def __init__(self, policy: KVCachePolicy | None, llm: Any) -> None:
        self._storage = policy.host_storage if policy is not None else None
        config = llm.llm_engine.vllm_config
        if self._storage is not None:
            from vllm_kvplugins.vllm_adapter.config.engine_config import geometry_of

            self._geometry: Geometry = geometry_of(config)

    def of(self, prompt_tokens: int, max_tokens: int) -> Row:
        if self._storage is None:
            return {"host_bytes": 0}
        tokens = prompt_tokens + max_tokens
        return {"host_bytes": self._storage.host_bytes(tokens, self._geometry)}


def _generate(
    llm: Any, policy: KVCachePolicy | None, prompts: Sequence[Prompt], **options: Any
) -> list[Any]:
    """vLLM's outputs, greedy, without reuse of earlier prompts."""
    from vllm import SamplingParams

    requests, sampling = [], []
    for prompt in prompts:
        salt = f"{prompt.task} {prompt.name} {time.monotonic_ns()}"
        requests.append(
            {"prompt_token_ids": list(prompt.token_ids), "cache_salt": salt}
        )
        defaults: Row = {"max_tokens": len(prompt.forced), "ignore_eos": True}
        if prompt.sample is not None:
            defaults = {
                "max_tokens": prompt.sample.max_tokens,
                "stop": list(prompt.sample.stop),
            }
        extra = _request_arguments(policy, prompt)
        settings = defaults | options
        sampling.append(SamplingParams(temperature=0, extra_args=extra, **settings))
    return list(llm.generate(requests, sampling, use_tqdm=False))


def _request_arguments(policy: KVCachePolicy | None, prompt: Prompt) -> Row | None:
    if policy is None or policy.turns is None:
        return None
    arguments: Row = {"turn_ends": [prompt.turn_end]}
    if policy.episode_routing is not None:
        arguments["patched_prompt"] = prompt.patched_prompt
    return arguments


def _divergence(
    llm: Any,
    policy: KVCachePolicy | None,
    prompt: Prompt,
    watch: ResidencyWatch,
    references: Path,
) -> Row:
    """KL divergence of the next-token distribution from stock's, mean over steps."""
    ForcedTokens.start(prompt.forced)
    (output,) = _generate(llm, policy, [prompt])
    assert list(output.outputs[0].token_ids) == list(prompt.forced)
    own = torch.stack([logp for _, logp in sorted(ForcedTokens.recorded.items())])
    ForcedTokens.start(())
    file = reference_file(references, prompt.name)
    if policy is None:
        references.mkdir(parents=True, exist_ok=True)
        np.save(file, own.numpy())
    stock = torch.from_numpy(np.load(file))
    # The first step's distribution comes from the prefill, which reads all tokens.
    steps = (stock.exp() * (stock - own)).sum(-1)[1:]
    held = watch.held.pop(output.request_id, Held())
    return {
        "task": KL,
        "sample": prompt.name,
        "group": prompt.group,
        "score": round(float(steps.mean()), 6),
        "prompt_tokens": len(prompt.token_ids),
        "answer_tokens": len(prompt.forced),
        "resident_bytes": _median(held.decode_bytes),
        "peak_bytes": held.peak_bytes or None,
    }


def _median(values: Sequence[int]) -> int | None:
    return round(float(np.median(values))) if len(values) else None


def _speed(llm: Any, policy: KVCachePolicy | None, prompt: Prompt) -> Iterator[Row]:
    """First token and decode rate of a request alone, after one warm-up round."""
    for number in range(-1, SPEED_ROUNDS):
        began = time.perf_counter()
        _generate(llm, policy, [prompt], max_tokens=1, ignore_eos=True)
        first = time.perf_counter() - began
        began = time.perf_counter()
        count = 1 + SPEED_TOKENS
        _generate(llm, policy, [prompt], max_tokens=count, ignore_eos=True)
        decode = time.perf_counter() - began - first
        if number >= 0:
            yield {
                "task": SPEED,
                "sample": f"round {number}",
                "group": f"round {number}",
                "score": round(SPEED_TOKENS / decode, 3),
                "first_token_ms": round(1e3 * first, 1),
                "prompt_tokens": len(prompt.token_ids),
            }
