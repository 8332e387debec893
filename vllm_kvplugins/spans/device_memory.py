"""Device memory of a prompt that is cut into spans.

Policies plan with these sizes, and the engine reports them::

    resident token   [ key | value ] in a page      + position
    entry            [ key | value ]                + bias + owner
    span             an entry for its mean          + what routing needs to rank it
    zoomed token     an entry
"""

from __future__ import annotations

from dataclasses import dataclass

_POSITION_BYTES = 4  # int32
_BIAS_BYTES = 4  # float32
_OWNER_BYTES = 8  # int64
_LOG_SIZE_BYTES = 4  # float32, the same for all layers and KV heads


@dataclass(frozen=True, slots=True)
class SpanMemory:
    """Sizes in one layer and KV head, in bytes.

    Attributes:
        row_bytes: a key and a value in the dtype of the cache.
        routing_bytes: what routing keeps for each span in addition to its mean.
    """

    row_bytes: float
    routing_bytes: float = 0.0

    @property
    def token_bytes(self) -> float:
        """A resident token."""
        return self.row_bytes + _POSITION_BYTES

    @property
    def entry_bytes(self) -> float:
        """A mean or a zoomed token; less on a GPU, where owners are on the host."""
        return self.row_bytes + _BIAS_BYTES + _OWNER_BYTES

    @property
    def span_bytes(self) -> float:
        """A span that is not zoomed."""
        return self.entry_bytes + self.routing_bytes

    def outside_pages(self, rows: int, spans: int, room: int) -> int:
        """Bytes of one request next to its pages, without positions.

        Args:
            rows: layers times KV heads.
            spans: number of spans.
            room: entries for zoomed tokens, per row.
        """
        per_row = spans * self.span_bytes + room * self.entry_bytes
        return round(rows * per_row) + spans * _LOG_SIZE_BYTES
