"""The retained regions of requests in one heap, and the moves of a compaction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvplugins.engine.compaction import compact
from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.page_table import PageTables
from vllm_kvplugins.engine.requests import DueCompaction, PageList, Resident, Row
from vllm_kvplugins.plan.residency_plan import Compaction


@dataclass(frozen=True, slots=True)
class RetainedRegions:
    """The pages of requests in one heap, before and after compactions.

    Attributes:
        tables: page tables of compacted requests.
    """

    heap: Heap
    tables: PageTables

    def owned(
        self, row: Row, blocks: torch.Tensor, resident: Resident | None
    ) -> PageList:
        """All pages of a request after this step, including the partial last page.

        Args:
            blocks: int64, physical ids; those in front of the tail are stale.
        """
        first = resident.tail_block if resident else 0
        used = -(-row.after_tokens // self.heap.layout.block_size)
        plain = PageList.of_blocks(self.heap, blocks[first:used], first)
        if resident is None:
            return plain
        return plain.after(
            *self.tables.retained(resident.slot_index), resident.positions
        )

    def competing(self, row: Row, owned: PageList) -> torch.Tensor:
        """int64 [rows]: pages whose slots compete.

        The partial last page is the tail. It does not compete.
        """
        return owned.owned - int(row.after_tokens % self.heap.layout.block_size > 0)

    def fixed(self, compaction: Compaction, resident: Resident | None) -> torch.Tensor:
        """int64 [rows]: first pages that stay whole; the shared prefix always does.

        Rows have different numbers of pages in the retained region. Behind it, each
        has one page per block.
        """
        if resident is None or not compaction.fixed_blocks:
            rows, device = self.heap.rows, self.heap.pages.device
            pages = compaction.shared_blocks + compaction.fixed_blocks
            return torch.full((rows,), pages, dtype=torch.int64, device=device)
        stop = compaction.candidates.start + compaction.fixed_blocks
        behind_region = stop - resident.tail_block
        return self.tables.retained(resident.slot_index)[1] + behind_region

    def compact(
        self,
        due: DueCompaction,
        resident: Resident | None,
        owned: PageList,
        competing: torch.Tensor,
        keep: torch.Tensor,
        counts: torch.Tensor,
    ) -> tuple[Resident, torch.Tensor]:
        """Move the tokens that stay into the new retained region.

        The pages of the shared prefix stay where they are: other requests read them.

        Args:
            resident: the region before; its slot index becomes invalid.
            keep: bool [rows, slots], the slots that stay.
            counts: int64 [rows], pages that each row has afterwards, with the prefix.

        Returns:
            The new region; int64 [rows, max pages], its pages, the prefix's first.
        """
        compaction, max_pages = due.compaction, int(competing.max())
        size, shared = self.heap.layout.block_size, compaction.shared_blocks
        retained = due.blocks[compaction.retained.start : compaction.retained.stop]
        after = compact(
            self.heap,
            keep[:, shared * size :],
            counts - shared,
            owned.pages[:, shared:max_pages],
            competing - shared,
            owned.positions[:, shared * size : max_pages * size],
            # The pages of the retained region, whichever row owns them now.
            self.heap.page_ids(retained).reshape(-1),
        )
        pages, positions = after.pages, after.positions
        if shared:
            pages = torch.cat([owned.pages[:, :shared], pages], 1)
            prefix = owned.positions[:, : shared * size]
            positions = torch.cat([prefix, positions], 1)
        new = Resident(
            self.tables.assign(pages, counts, compaction.retained.stop),
            compaction.at_tokens,
            compaction.retained.stop,
            positions,
        )
        # Only now: a request without a slot index would own no pages.
        if resident is not None:
            self.tables.release(resident.slot_index)
        return new, pages
