"""What live requests came with, as far as a policy needs it."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_kvplugins.policies.base import KVCachePolicy


class Prompts:
    """Prompts, what requests want to be asked, and where their turns end.

    Attributes:
        tokens: per request the prompt and the patched prompt, if the policy reads them.
    """

    def __init__(self, policy: KVCachePolicy) -> None:
        self._policy = policy
        self.tokens: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
        self._turn_ends: dict[str, tuple[int, ...]] = {}

    def learn(
        self,
        request_id: str,
        prompt: Sequence[int],
        turn_ends: Sequence[int] | None,
        patched_prompt: Sequence[int],
    ) -> None:
        """A new request."""
        policy = self._policy
        if policy.probing is not None or policy.spans is not None:
            self.tokens[request_id] = prompt, patched_prompt
        if policy.turns is not None:
            self._turn_ends[request_id] = policy.turns.turn_ends(prompt, turn_ends)

    def turn_ends(self, request_id: str) -> tuple[int, ...]:
        """Of a request whose prompt has turns, else none."""
        return self._turn_ends.get(request_id, ())

    def forget(self, request_id: str) -> None:
        """A request is over."""
        self.tokens.pop(request_id, None)
        self._turn_ends.pop(request_id, None)

    @property
    def request_ids(self) -> set[str]:
        """Who is remembered."""
        return {*self.tokens, *self._turn_ends}
