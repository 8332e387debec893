"""Base class of policies that decide when to compress; a compressor scores tokens."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, PrivateAttr, ValidationError, field_validator

from vllm_kvplugins.budgets.base import LoadFingerprint
from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.base import KVCachePolicy, contract_hooks


class Wrapper(KVCachePolicy):
    """Base class of policies around any compressor.

    Subclasses write ``plan`` and set the budget, so ``base_config`` contains none. A
    hook that neither this class nor the subclass overrides is forwarded to the
    compressor, also if it is added to the contract later (see the end of this file).
    """

    # Settings of the compressor that the wrapper sets itself.
    taken_settings: ClassVar[tuple[str, ...]] = (
        "budget",
        "decode_budget",
        "fold_blocks",
        "prefill_block",
    )
    # What the user sets instead; a clause of an error message.
    instead: ClassVar[str]

    base: str = Field(
        default="snapkv",
        description="Compressor that scores tokens.",
    )
    base_config: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the compressor, without a budget.",
    )
    _base: KVCachePolicy = PrivateAttr()

    @field_validator("base")
    @classmethod
    def _is_a_compressor(cls, name: str) -> str:
        from vllm_kvplugins.policies.registry import get_policy_class

        try:
            policy_class = get_policy_class(name)
        except KVPolicyError as error:
            raise ValueError(str(error)) from error
        if not policy_class.compresses:
            raise ValueError(
                coded(
                    "KVP111",
                    f"base {name!r} does not compress; use a compressor, such as "
                    "snapkv",
                )
            )
        return name

    def model_post_init(self, context: Any) -> None:
        from vllm_kvplugins.policies.registry import get_policy_class

        taken = [key for key in self.taken_settings if key in self.base_config]
        if taken:
            raise ValueError(
                coded(
                    "KVP112",
                    f"base_config must not contain {', '.join(taken)}: {self.instead}",
                )
            )
        try:
            self._base = get_policy_class(self.base).model_validate(self.base_config)
        except ValidationError as error:
            reasons = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()
            )
            raise ValueError(
                coded(
                    "KVP113",
                    f"base_config is not valid for {self.base}: {reasons}; see "
                    "`kvplugins list` for its settings",
                )
            ) from error

    def __hash__(self) -> int:
        # vLLM hashes the policy as part of the cache's spec, but dicts have no hash.
        return hash(repr(self))

    # -- hooks that the compressor does not decide ----------------------------------

    def max_prompt_blocks(self, tokens: int, geometry: Geometry) -> int | None:
        """No limit, unless a subclass compresses the prompt in blocks.

        The compressor's own limit belongs to its own plan.
        """
        return None

    def with_allocator(
        self, request: dict[str, Any], allocator: dict[str, Any]
    ) -> dict[str, Any]:
        """Set the allocator where the user sets it: here, or in ``base_config``."""
        if "allocator" in self.taken_settings:
            return super().with_allocator(request, allocator)
        base = self._base.with_allocator(self.base_config, allocator)
        return request | {"base_config": base}

    def problems(self) -> list[str]:
        """Problems of the compressor, with its name."""
        return [f"{self.base}: {problem}" for problem in self._base.problems()]

    def model_problems(self, model: LoadFingerprint) -> list[str]:
        """Reasons of the compressor, with its name."""
        return [f"{self.base}: {why}" for why in self._base.model_problems(model)]

    @property
    def remarks(self) -> list[str]:
        """Remarks of the compressor, with its name."""
        return [f"{self.base}: {remark}" for remark in self._base.remarks]


def _forwarding(name: str) -> Any:
    """A hook that calls the compressor's."""
    if isinstance(vars(KVCachePolicy)[name], property):
        return property(lambda self: getattr(self._base, name))

    def method(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._base, name)(*args, **kwargs)

    method.__name__ = name
    return method


# ``plan`` is abstract: each wrapper writes its own. Hooks that the class above does not
# override go to the compressor.
_overridden = {"plan", *vars(Wrapper)}
for _hook in contract_hooks():
    if _hook not in _overridden:
        setattr(Wrapper, _hook, _forwarding(_hook))
