"""Memory of the entries that requests attend to in addition to their pages.

Keys, values and biases are on the device of attention. A request has one run of
entries, at the same place in all layers::

    entry  0 ........ 600 ........ 1500 ........ 2100 ......... capacity
           request a     request b      (free)       request c

A run is allocated in the first gap that is large enough. If there is none, all runs
move to a larger arena. The arena is freed with its last run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_CPU = torch.device("cpu")


class EntryArena:
    """Entries of all requests on one worker.

    Args:
        head_dim: elements of a key, and of a value.
        dtype: dtype of both.
        device: the device on which queries attend to them.

    Attributes:
        keys, values: [layers, capacity, head_dim].
        bias: float32 [layers, capacity], added to the score; -inf for unused entries.
            All are replaced when runs move.
    """

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor

    def __init__(
        self,
        num_layers: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device = _CPU,
    ) -> None:
        self._num_layers, self._head_dim, self._dtype = num_layers, head_dim, dtype
        self._device = device
        self._gaps: list[tuple[int, int]] = []  # start and stop, in order
        self._allocate(0)

    # The first run is allocated in a step, the last one released between steps.
    @torch.inference_mode(False)
    def _allocate(self, capacity: int) -> None:
        shape = (self._num_layers, capacity)
        self.keys = torch.zeros(
            *shape, self._head_dim, dtype=self._dtype, device=self._device
        )
        self.values = torch.zeros_like(self.keys)
        self.bias = torch.full(shape, -torch.inf, device=self._device)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [self.keys, self.values, self.bias]

    @property
    def _marks(self) -> list[tuple[torch.Tensor, float, str]]:
        """Tensors whose value tells that an entry is unused, that value, and what any
        other value means."""
        return [(self.bias, -torch.inf, "has a bias")]

    @property
    def capacity(self) -> int:
        """Entries per layer, allocated or free."""
        return int(self.keys.shape[1])

    @property
    def allocated_device_bytes(self) -> int:
        """Bytes of all tensors on the device of attention, in use or not."""
        return sum(
            tensor.nbytes for tensor in self._tensors if tensor.device == self._device
        )

    @property
    def free(self) -> int:
        """Free entries per layer."""
        return sum(stop - start for start, stop in self._gaps)

    def take(self, count: int) -> int:
        """Allocate a run of unused entries. All runs move if no gap is long enough.

        Returns:
            The first entry of the run.

        Cost: a copy of all entries if they move; the arena then at least doubles.
        """
        assert count > 0, "an empty run"
        for i, (start, stop) in enumerate(self._gaps):
            if stop - start >= count:
                self._gaps[i] = (start + count, stop)
                if start + count == stop:
                    del self._gaps[i]
                return start
        self._grow(count)
        return self.take(count)

    def _grow(self, count: int) -> None:
        old_tensors, old = self._tensors, self.capacity
        self._allocate(max(2 * old, old + count))
        for source, target in zip(old_tensors, self._tensors, strict=True):
            target[:, :old] = source
        self._add_gap(old, self.capacity)

    def release(self, start: int, count: int) -> None:
        """Free a run."""
        for tensor, unused, _ in self._marks:
            tensor[:, start : start + count] = unused
        self._add_gap(start, start + count)
        if self.free == self.capacity:
            self._gaps = []
            self._allocate(0)

    def _add_gap(self, start: int, stop: int) -> None:
        merged: list[tuple[int, int]] = []
        for gap in sorted([*self._gaps, (start, stop)]):
            if merged and merged[-1][1] == gap[0]:
                merged[-1] = (merged[-1][0], gap[1])
            else:
                merged.append(gap)
        self._gaps = merged

    def check_integrity(self, taken: Sequence[tuple[int, int]]) -> None:
        """Check that runs and gaps cover the arena once, and that gaps are unused.

        Args:
            taken: first entry and number of entries of each run that is in use.
        """
        runs = [(start, start + count) for start, count in taken]
        end = 0
        for start, stop in sorted([*runs, *self._gaps]):
            assert start == end, f"entries {end} to {start} are lost or shared"
            end = stop
        assert end == self.capacity, "entries at the end are lost"
        for start, stop in self._gaps:
            for tensor, unused, otherwise in self._marks:
                assert bool((tensor[:, start:stop] == unused).all()), (
                    f"free, but {otherwise}"
                )
