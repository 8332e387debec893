"""Layers of a drafter with a KV cache of its own: they follow the model's layers.

A drafter (a small model, or a head such as EAGLE's) writes keys and values of the same
tokens into the same blocks as the model. When a compaction frees blocks, the pages of
the draft layers in these blocks are lost too, so their kept tokens move with those of
the model::

    model's layers   0    1    2    3        scores of the policy
                          |         |
    draft layers          0         1        keep the tokens with the best scores

Each draft layer follows one layer of the model, and each of its KV heads one KV head
of that layer: a token has the score that it has there. The draft layers of a copy of
the model follow its own layers one by one. All draft rows keep the same number of
pages, the model's average, also where the policy gives its rows different numbers.

Other tokens than the model's do no harm, because the model verifies each draft. So the
draft layers have no retrieval and no spans: they attend to the tokens that the last
compaction kept, and to all later ones.

Draft tokens beyond the accepted ones lie behind the last computed token. The drafter
computes their keys and values again in the next step, and a compaction never includes
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.page_table import FlatTable, PageTables
from vllm_kvplugins.engine.requests import DueCompaction, Resident
from vllm_kvplugins.engine.retained_regions import RetainedRegions
from vllm_kvplugins.scoring.selection import keep_top


def followed_layer(draft_layer: int, num_draft_layers: int, num_layers: int) -> int:
    """The layer of the model that a draft layer follows: at the same relative depth.

    The last draft layer follows the last layer, and so does the only one of an EAGLE
    head, which computes with the last layer's hidden states.
    """
    return max((draft_layer + 1) * num_layers // num_draft_layers - 1, 0)


class DraftLayers:
    """The retained regions of all compacted requests in the draft layers.

    Args:
        heap: of the draft layers. Its blocks are those of the model's heap; number and
            size of its KV heads may be others.
        model: heap of the layers that the policy manages.

    Attributes:
        regions: the retained regions, which sessions save and restore.
    """

    def __init__(self, heap: Heap, model: Heap) -> None:
        tables = PageTables(
            heap.num_layers,
            heap.num_kv_heads,
            heap.num_blocks,
            heap.layout.block_size,
            uniform=True,
            device=heap.pages.device,
        )
        self.heap = heap
        self.regions = RetainedRegions(heap, tables)
        self._residents: dict[str, Resident] = {}
        # int64 [rows]: the model's row that each row follows.
        self._followed = torch.tensor(
            [
                followed_layer(layer, heap.num_layers, model.num_layers)
                * model.num_kv_heads
                + head * model.num_kv_heads // heap.num_kv_heads
                for layer in range(heap.num_layers)
                for head in range(heap.num_kv_heads)
            ],
            device=heap.pages.device,
        )

    def build(
        self,
        request_ids: Sequence[str],
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        longest_lens: Sequence[int] | None = None,
    ) -> FlatTable:
        """Page table of one forward pass of the drafter.

        Args:
            request_ids: in batch order.
            seq_lens: [rows], logical tokens, drafts included; rows behind the requests
                are padding.
            block_table: int32 [rows, blocks], vLLM's.
            longest_lens: limits of ``seq_lens`` on the host, which does not know how
                many drafts were accepted; None: the host waits for the device.
        """
        slot_indices = [0] * seq_lens.numel()
        for index, request_id in enumerate(request_ids):
            resident = self._residents.get(request_id)
            if resident is not None:
                slot_indices[index] = resident.slot_index
        return self.regions.tables.build(
            slot_indices, seq_lens, block_table, longest_lens=longest_lens
        )

    def compact(
        self, due: DueCompaction, scores: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Keep the tokens of a request that have the best scores in the model.

        Args:
            scores: float32 [layers, kv_heads, slots], of the model; -inf where no slot
                competes.
            positions: int32 [rows, slots] of these slots or more, -1 in unused ones.
        """
        row, compaction, size = due.row, due.compaction, self.heap.layout.block_size
        resident = self._residents.get(row.request_id)
        owned = self.regions.owned(row, due.blocks, resident)
        competing = self.regions.competing(row, owned)
        fixed = self.regions.fixed(compaction, resident)
        slots = int(competing.max()) * size
        own = self._scores_at(owned.positions[:, :slots], scores, positions)
        place = torch.arange(slots, device=own.device)
        is_fixed = place < fixed[:, None] * size
        competes = ~is_fixed & (place < competing[:, None] * size)
        own.masked_fill_(~competes, -torch.inf)
        kept = compaction.shared_blocks + len(compaction.retained)
        counts = torch.full_like(competing, kept)
        keep = is_fixed | keep_top(own, (counts - fixed) * size)
        self._residents[row.request_id], _ = self.regions.compact(
            due, resident, owned, competing, keep, counts
        )

    def _scores_at(
        self, own: torch.Tensor, scores: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Scores of the tokens in the slots of the draft layers.

        A token that the followed row does not hold, because the policy gave it fewer
        pages or fetched others, gets the lowest score.

        Args:
            own: int32 [draft rows, slots], positions of the draft layers.
            scores, positions: as in :meth:`compact`.

        Returns:
            float32 [draft rows, slots], finite or ``inf``.
        """
        lowest = torch.finfo(scores.dtype).min
        followed = scores.flatten(0, 1)[self._followed].clamp(min=lowest)
        at = positions[self._followed, : followed.shape[1]].long()
        behind = int(max(own.max(), at.max())) + 1
        by_position = followed.new_full((len(at), behind + 1), lowest)
        by_position.scatter_(1, torch.where(at >= 0, at, behind), followed)
        by_position[:, behind] = lowest
        own = own.long()
        return by_position.gather(1, torch.where(own >= 0, own, behind))

    def resident(self, request_id: str) -> Resident | None:
        """The retained region of a request; None: it was never compacted."""
        return self._residents.get(request_id)

    def resume(self, request_id: str, resident: Resident | None) -> None:
        """Let a request continue from a retained region that a session restored.

        Args:
            resident: None: the session was never compacted.
        """
        if resident is not None:
            self._residents[request_id] = resident

    def forget(self, request_id: str) -> None:
        """Drop the state of a request, if there is any."""
        resident = self._residents.pop(request_id, None)
        if resident is not None:
            self.regions.tables.release(resident.slot_index)

    def device_bytes(self, request_id: str) -> int:
        """Device memory of a request outside vLLM's pool of blocks, in bytes."""
        resident = self._residents.get(request_id)
        if resident is None:
            return 0
        return self.regions.tables.request_bytes + int(resident.positions.nbytes)

    @property
    def allocated_device_bytes(self) -> int:
        """Device memory that is allocated outside vLLM's pool of blocks, in bytes."""
        residents = self._residents.values()
        positions = sum(int(each.positions.nbytes) for each in residents)
        return self.regions.tables.num_bytes + positions

    def check_integrity(self, compacted: set[str]) -> None:
        """The draft layers of exactly the compacted requests have slot indices.

        Args:
            compacted: ids of the requests with a retained region.
        """
        assert set(self._residents) == compacted, (
            f"draft layers of {sorted(self._residents)} are compacted, and requests "
            f"{sorted(compacted)}"
        )
        slot_indices = {each.slot_index for each in self._residents.values()}
        assert len(slot_indices) == len(compacted), "slot indices shared"
        assert self.regions.tables.num_slot_indices == len(compacted), (
            "slot indices leaked"
        )
