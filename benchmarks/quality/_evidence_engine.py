"""One engine of ``evidence.py``: answers and divergences of one policy."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from _evidence_samples import FORCED_TOKENS, KL, Prompt, reference_file
from _prefill_replay import record_prefills, replay_prefills
from _prefill_store import PrefillStore
from _quality_engine import Held, ResidencyWatch, open_engine, row_of
from _quality_samples import Setting
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.base import KVCachePolicy

Row = dict[str, Any]


class ForcedTokens(AdapterLogitsProcessor):
    """Forces the answers of requests, and records the log-probabilities of each token.

    A request names the answer in ``extra_args``. vLLM also samples, and discards, a
    token after each chunk of the prompt; the number of output tokens tells which token
    is due.

    Attributes:
        answers: tokens to force, by name.
        recorded: log-probabilities by name, then by step.
    """

    ARGUMENT = "forced_answer"
    answers: ClassVar[dict[str, Sequence[int]]] = {}
    recorded: ClassVar[dict[str, dict[int, torch.Tensor]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        name = (params.extra_args or {}).get(self.ARGUMENT)
        return None if name is None else functools.partial(self.force, name)

    @classmethod
    def force(cls, name: str, output: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Logits that allow the next token of the answer only.

        Args:
            output: tokens generated so far.
            logits: [vocabulary].
        """
        step, answer = len(output), cls.answers[name]
        if step >= len(answer):
            return logits
        steps = cls.recorded.setdefault(name, {})
        steps[step] = logits.float().log_softmax(-1).clone()
        forced = torch.full_like(logits, -torch.inf)
        forced[answer[step]] = 0.0
        return forced


def measure_policy(
    setting: Setting,
    policy: Mapping[str, Any],
    prompts: Sequence[Prompt],
    max_model_len: int,
    batch: int,
    references: Path,
    prefills: Path | None,
) -> Iterator[Row]:
    """One row per prompt.

    Args:
        prompts: that have no row yet.
        references: folder of stock's log-probabilities; stock writes them.
        prefills: folder of recorded prompts, see ``_prefill_replay``; stock writes
            them. None = every engine computes every prompt.

    Cost: start-up of an engine, the prompts that are not recorded, and the answers.
    """
    llm = open_engine(
        setting,
        policy,
        max_model_len,
        batch,
        logits_processors=[ForcedTokens],
        # All prompts of a batch start in one step, so that it can be replayed.
        max_num_batched_tokens=batch * max_model_len if prefills else 2048,
    )
    parsed = parse_policy(dict(policy)) if policy else None
    if prefills is not None:
        store = PrefillStore(prefills, setting.model, setting.dtype)
        texts = [prompt.token_ids for prompt in prompts]
        if parsed is None:
            record_prefills(llm, store, texts)
        else:
            replay_prefills(llm, store, texts, parsed)
    watch = ResidencyWatch(llm)
    host = _HostBytes(parsed, llm)
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        ForcedTokens.recorded.clear()
        for prompt, output in zip(part, _generate(llm, parsed, part), strict=True):
            held = watch.held.pop(output.request_id, Held())
            if prompt.sample is None:
                row = _divergence(prompt, output, held, references, not policy)
                max_tokens = FORCED_TOKENS
            else:
                row = row_of(prompt.sample, output, held)
                max_tokens = prompt.sample.max_tokens
            yield row | host.of(len(prompt.token_ids), max_tokens)


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
    llm: Any, policy: KVCachePolicy | None, prompts: Sequence[Prompt]
) -> list[Any]:
    """vLLM's outputs, greedy, without reuse of earlier prompts."""
    requests, sampling = [], []
    for prompt in prompts:
        salt = f"{prompt.task} {prompt.name} {time.monotonic_ns()}"
        requests.append(
            {"prompt_token_ids": list(prompt.token_ids), "cache_salt": salt}
        )
        extra = _request_arguments(policy, prompt)
        settings: Row = {"max_tokens": len(prompt.forced), "ignore_eos": True}
        if prompt.sample is not None:
            settings = {
                "max_tokens": prompt.sample.max_tokens,
                "stop": list(prompt.sample.stop),
            }
        else:
            ForcedTokens.answers[prompt.name] = prompt.forced
            extra[ForcedTokens.ARGUMENT] = prompt.name
        sampling.append(SamplingParams(temperature=0, extra_args=extra, **settings))
    return list(llm.generate(requests, sampling, use_tqdm=False))


def _request_arguments(policy: KVCachePolicy | None, prompt: Prompt) -> Row:
    if policy is None or policy.turns is None:
        return {}
    arguments: Row = {"turn_ends": [prompt.turn_end]}
    if policy.episode_routing is not None:
        arguments["patched_prompt"] = prompt.patched_prompt
    return arguments


def _divergence(
    prompt: Prompt, output: Any, held: Held, references: Path, is_stock: bool
) -> Row:
    """KL divergence of the next-token distribution from stock's, mean over steps."""
    assert list(output.outputs[0].token_ids) == list(prompt.forced)
    steps = ForcedTokens.recorded[prompt.name]
    own = torch.stack([logp for _, logp in sorted(steps.items())])
    file = reference_file(references, prompt.name)
    if is_stock:
        references.mkdir(parents=True, exist_ok=True)
        np.save(file, own.numpy())
    stock = torch.from_numpy(np.load(file))
    # The first step's distribution comes from the prefill, which reads all tokens.
    divergences = (stock.exp() * (stock - own)).sum(-1)[1:]
    return {
        "task": KL,
        "sample": prompt.name,
        "group": prompt.group,
        "score": round(float(divergences.mean()), 6),
        "prompt_tokens": len(prompt.token_ids),
        "answer_tokens": len(prompt.forced),
        "resident_bytes": _median(held.decode_bytes),
        "peak_bytes": held.peak_bytes or None,
    }


def _median(values: Sequence[int]) -> int | None:
    return round(float(np.median(values))) if len(values) else None
