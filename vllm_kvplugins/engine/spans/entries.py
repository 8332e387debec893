"""Memory of the entries that requests attend to beside their pages.

Keys, values and their bias are where attention reads them; who is on, and whose, is
known on the host as well. All layers lie alike: a request has one run of entries, at
the same place in each::

    entry  0 ........ 600 ........ 1500 ........ 2100 ......... capacity
           request a     request b      (free)       request c

Runs are taken from the first gap that is large enough. When none is, everything moves
to a larger arena; when the last run is given back, the arena goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_kvplugins.ops.zoom import ZoomEntries

_CPU = torch.device("cpu")


class EntryArena:
    """Entries of all requests on one worker.

    Args:
        head_dim: elements of a key, and of a value.
        dtype: of both.
        device: where queries attend to them.
    """

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

    # the first run is taken in a step, the last one given back between two
    @torch.inference_mode(False)
    def _allocate(self, capacity: int) -> None:
        shape = (self._num_layers, capacity)
        self._keys = torch.zeros(
            *shape, self._head_dim, dtype=self._dtype, device=self._device
        )
        self._values = torch.zeros_like(self._keys)
        self._bias = torch.full(shape, -torch.inf)
        self._owner = torch.full(shape, -1)
        self._there: torch.Tensor | None = None
        if self._device.type != "cpu":
            self._there = torch.full(shape, -torch.inf, device=self._device)
        # views cost more than what is done with them in a step
        self.layers = [
            ZoomEntries(*(part[layer] for part in self._all))
            for layer in range(self._num_layers)
        ]

    @property
    def _all(self) -> list[torch.Tensor]:
        known = [self._keys, self._values, self._bias, self._owner]
        return known if self._there is None else [*known, self._there]

    @property
    def capacity(self) -> int:
        """Entries per layer, taken or not."""
        return int(self._bias.shape[1])

    def num_bytes(self, count: int) -> int:
        """Keys and values of so many entries, all layers together."""
        return int(2 * count * self._num_layers * self._head_dim * self._dtype.itemsize)

    @property
    def free(self) -> int:
        """Entries per layer that nobody has."""
        return sum(stop - start for start, stop in self._gaps)

    def take(self, count: int) -> int:
        """Take a run of entries, all off. Moves the others if none is long enough.

        Returns:
            Its first entry.

        Cost: a copy of all entries if they move; each time to twice the room at least.
        """
        assert count > 0, "a run of nothing"
        for i, (start, stop) in enumerate(self._gaps):
            if stop - start >= count:
                self._gaps[i] = (start + count, stop)
                if start + count == stop:
                    del self._gaps[i]
                return start
        self._grow(count)
        return self.take(count)

    def _grow(self, count: int) -> None:
        before, old = self._all, self.capacity
        self._allocate(max(2 * old, old + count))
        for source, target in zip(before, self._all, strict=True):
            target[:, :old] = source
        self._add_gap(old, self.capacity)

    def give(self, start: int, count: int) -> None:
        """Give a run back that was taken."""
        self._owner[:, start : start + count] = -1
        for bias in (self._bias, self._there):
            if bias is not None:
                bias[:, start : start + count] = -torch.inf
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
        """Runs and gaps cover everything once, and nothing is on in a gap.

        Args:
            taken: first entry and number of entries of each run that somebody has.
        """
        runs = [(start, start + count) for start, count in taken]
        end = 0
        for start, stop in sorted([*runs, *self._gaps]):
            assert start == end, f"entries {end} to {start} are nobody's, or shared"
            end = stop
        assert end == self.capacity, "entries at the end are nobody's"
        for start, stop in self._gaps:
            assert bool((self._bias[:, start:stop] == -torch.inf).all()), "a free one"
            assert bool((self._owner[:, start:stop] == -1).all()), "owned but free"
