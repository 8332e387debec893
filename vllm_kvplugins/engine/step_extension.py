"""What a policy may do around a step besides compactions.

Most policies only drop tokens and need none of this. A policy that keeps tokens in
host memory brings them back before a layer attends (retrieval); a policy that keeps
spans attends to more than the pages of a request (spans). Both are extensions of the
step::

    begin_step
      before_layer ── attention (or attend) ── after_layer      once per layer
    end_step
      before_compaction ── tokens move ── after_compaction      once per compaction
    forget, detach, attach                                      between steps

:class:`~vllm_kvplugins.engine.runtime.PolicyRuntime` holds a list of extensions. It
calls each of them and never asks which one it is. Every method has a default that
does nothing, so an extension overrides only what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvplugins.engine.recorded_run import Fetch
from vllm_kvplugins.engine.requests import DueCompaction, PageList, Row
from vllm_kvplugins.ops.layout import PagedKV
from vllm_kvplugins.plan.residency_plan import Compaction


@dataclass(slots=True)
class Traffic:
    """Counts over all layers and KV heads.

    Attributes:
        selected: tokens that queries selected.
        fetched: selected tokens that were copied or reconstructed because they were
            not resident.
        failed: indices or decompositions that raised an error.
    """

    selected: int = 0
    fetched: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is about to run.

    Attributes:
        rows: its requests, in batch order; empty for a dummy batch.
        followed: the rows for which the policy has step requirements.
        due: compactions that run after the step.
        pages_of: the pages of a request before its compaction.
    """

    rows: Sequence[Row]
    followed: Sequence[Row]
    due: Sequence[DueCompaction]
    pages_of: Callable[[DueCompaction], PageList]


class StepExtension:
    """Base of extensions; see the module for the order of calls."""

    # -- one step -----------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """Prepare for a step, before its first layer runs."""

    def before_layer(self, layer: int, queries: torch.Tensor) -> None:
        """Called when a layer is about to attend, after its cache was written.

        Args:
            queries: [step tokens, num_q_heads, head_dim], after RoPE.
        """

    @property
    def attends_any(self) -> bool:
        """Whether the extension computes the attention of at least one row."""
        return False

    def attends_all(self, layer: int) -> bool:
        """Whether it computes the attention of every row of the step in a layer.

        The stock kernel then does not run.
        """
        return False

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        kv: PagedKV,
        pages: torch.Tensor,
        lengths: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Compute the attention of the extension's own rows.

        Args:
            queries: [step tokens, num_q_heads, head_dim].
            kv: the layer's pages, or those of the whole heap.
            pages: int32 [rows * num_kv_heads, max pages], ids of pages in ``kv``.
            lengths: int32 [rows * num_kv_heads], tokens in these pages.
            output: same shape as ``queries``; only the extension's rows are written.
        """
        raise AssertionError(f"{type(self).__name__} attends for no row")

    def after_layer(self, layer: int, queries: torch.Tensor) -> None:
        """Called when a layer has attended.

        Args:
            queries: [step tokens, num_q_heads, head_dim], after RoPE.
        """

    def end_step(
        self, prompts: Mapping[str, tuple[Sequence[int], Sequence[int]]]
    ) -> None:
        """Called after the forward pass, before the step's compactions.

        Args:
            prompts: token ids of the prompt and of the patched prompt, by request.
        """

    # -- compactions ----------------------------------------------------------------

    def refresh_positions(self, request_id: str, positions: torch.Tensor) -> None:
        """Write the current contents of a retained region into its positions.

        Called before anything reads the region, for a compaction or for a session.

        Args:
            positions: int32 [rows, slots] of the region; updated in place.
        """

    def before_compaction(
        self, due: DueCompaction, owned: PageList
    ) -> dict[int, Any] | None:
        """Take what leaves the cache with a compaction.

        Args:
            owned: the request's pages.

        Returns:
            Per layer, what the policy's ``score`` sees as ``view.observed``; None
            keeps what the policy observed.
        """
        return None

    def after_compaction(
        self, request_id: str, pages: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Note where a compaction, or a restored session, put the retained tokens.

        Args:
            pages: int64 [rows, max pages], the retained region.
            positions: int32 [rows, max pages * block_size], -1 in unused slots.
        """

    # -- requests -------------------------------------------------------------------

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the state of requests."""

    def detach(self, request_id: str) -> Any:
        """Remove the state of a request, for a session; None if it has no state."""
        return None

    def attach(self, request_id: str, state: Any) -> None:
        """Give detached state to the request that continues the session.

        ``after_compaction`` comes next, with the request's retained region.

        Args:
            state: returned by ``detach``, not None.
        """
        raise AssertionError(f"{type(self).__name__} has no state to attach")

    def continued(self, state: Any, compaction: Compaction, moves: bool) -> Any:
        """Detached state for a request that continues the session of ``state``.

        Args:
            state: returned by ``detach``, not None. It stays valid unless it moves.
            compaction: the last one of the request, which may be earlier than that of
                the session.
            moves: nobody else will continue the session.

        Raises:
            RuntimeError: there is no room for it; nothing has changed.
        """
        raise AssertionError(f"{type(self).__name__} has no state to continue")

    def held_positions(self, state: Any, layer: int) -> range:
        """Positions whose keys and values detached state holds in a layer."""
        return range(0)

    def read_held(
        self, state: Any, layer: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that detached state holds.

        Args:
            positions: int64 [n], of ``held_positions``.

        Returns:
            Two [num_kv_heads, n, head_dim] in host memory, elements of the cache.
        """
        raise AssertionError(f"{type(self).__name__} holds no tokens")

    def discard(self, state: Any) -> None:
        """Free detached state, not None, that no request will attach."""
        raise AssertionError(f"{type(self).__name__} has no state to discard")

    @property
    def num_requests(self) -> int:
        """Requests that have state here."""
        return 0

    def check_integrity(self) -> None:
        """Raise AssertionError if the state contradicts itself."""

    def close(self) -> None:
        """Release memory outside the KV cache; called when no request has state."""

    # -- observability --------------------------------------------------------------

    def device_bytes(self, request_id: str) -> int:
        """Device memory that a request uses outside vLLM's pool of blocks."""
        return 0

    @property
    def allocated_device_bytes(self) -> int:
        """Device memory outside vLLM's pool that is allocated now, of all requests.

        Read between steps, several times per second: O(requests) at most.
        """
        return 0

    def take_traffic(self) -> Traffic:
        """Counts since the last call."""
        return Traffic()

    def start_log(self) -> bool:
        """Start to log every fetch; False if the extension fetches nothing."""
        return False

    def take_log(self) -> list[Fetch]:
        """Fetches logged since the last call; empty unless logging is on."""
        return []
