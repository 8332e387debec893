"""The base of policies that decide when and how much, and leave what to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field, PrivateAttr, ValidationError, field_validator

from vllm_kvplugins.budgets import PageAllocator
from vllm_kvplugins.policies.base import (
    Encode,
    KVCachePolicy,
    LayerView,
    Probe,
    ProbeOccasion,
    Trigger,
)


class Wrapper(KVCachePolicy):
    """A policy around any compressor, which scores for it.

    Subclasses write ``plan``; budgets are theirs, so ``base_config`` has none.
    """

    # Settings of the base that the wrapper decides, and what to use instead.
    taken_settings: ClassVar[tuple[str, ...]] = (
        "budget",
        "decode_budget",
        "fold_blocks",
        "prefill_block",
    )
    instead: ClassVar[str]

    base: str = Field(
        default="snapkv",
        description="The compressor: a policy that drops tokens.",
    )
    base_config: dict[str, Any] = Field(
        default_factory=dict, description="Its settings, without a budget."
    )
    _base: KVCachePolicy = PrivateAttr()

    @field_validator("base")
    @classmethod
    def _is_a_compressor(cls, name: str) -> str:
        from vllm_kvplugins.errors import KVPolicyError
        from vllm_kvplugins.policies.registry import get_policy_class

        try:
            found = get_policy_class(name)
        except KVPolicyError as error:
            raise ValueError(str(error)) from error
        if not found.compresses:
            raise ValueError(f"{name!r} does not compress; give a compressor")
        return name

    def model_post_init(self, context: Any) -> None:
        from vllm_kvplugins.policies.registry import get_policy_class

        taken = [key for key in self.taken_settings if key in self.base_config]
        if taken:
            raise ValueError(
                f"base_config must not hold {', '.join(taken)}: {self.instead}"
            )
        try:
            self._base = get_policy_class(self.base).model_validate(self.base_config)
        except ValidationError as error:
            said = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()
            )
            raise ValueError(f"base_config does not fit {self.base}: {said}") from error

    def __hash__(self) -> int:
        # vLLM hashes it as a part of the cache's description; a dict has no hash
        return hash(repr(self))

    # -- what the base does ------------------------------------------------------

    @property
    def needs_rotary(self) -> bool:  # type: ignore[override]
        return self._base.needs_rotary

    @property
    def queries_needed(self) -> int:
        return self._base.queries_needed

    @property
    def observes(self) -> Trigger:
        return self._base.observes

    @property
    def needs_tokenizer(self) -> bool:
        return self._base.needs_tokenizer

    @property
    def minimum_budget_tokens(self) -> int:
        return self._base.minimum_budget_tokens

    def score(self, view: LayerView) -> torch.Tensor:
        return self._base.score(view)

    def observe(self, view: LayerView) -> Any:
        return self._base.observe(view)

    def pack_observed(self, observed: Any) -> dict[str, torch.Tensor]:
        return self._base.pack_observed(observed)

    def unpack_observed(self, packed: dict[str, torch.Tensor]) -> Any:
        return self._base.unpack_observed(packed)

    def probe_room(self, encode: Encode) -> int:
        return self._base.probe_room(encode)

    def probes(self, occasion: ProbeOccasion) -> Sequence[Probe]:
        return self._base.probes(occasion)

    def page_allocator(self) -> PageAllocator:
        return self._base.page_allocator()

    def with_allocator(
        self, request: dict[str, Any], allocator: dict[str, Any]
    ) -> dict[str, Any]:
        if "allocator" in self.taken_settings:
            return super().with_allocator(request, allocator)
        base = self._base.with_allocator(self.base_config, allocator)
        return request | {"base_config": base}

    def problems(self) -> list[str]:
        return [f"{self.base}: {problem}" for problem in self._base.problems()]
