"""Codes of keys on a device, from which the device selects tokens itself.

A key has one byte per dimension and one scale. Center and width of each dimension are
measured on the first keys of a request, as those of ``CodedIndex``. Codes lie in pages
that have the numbers of the host pages with the same tokens, so that one page table
serves both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvplugins.index.base import KeyIndex
from vllm_kvplugins.index.keys import Keys
from vllm_kvplugins.ops.code_select import (
    HostRequests,
    KeyCodes,
    code_votes,
    encode_keys,
)

# So many first keys measure the space of codes, however they arrive. Until a request
# has them, its codes are those of a space without center and width.
FIT_KEYS = 128
_LEAST_WIDTH = 1e-3  # of the largest


@dataclass(frozen=True, slots=True, eq=False)
class CodeSpace:
    """Center and width of each dimension of the keys of one request and layer.

    Attributes:
        center, width: float32 [heads, head_dim]; widths are positive.
        is_fit: whether they were measured.
    """

    center: torch.Tensor
    width: torch.Tensor
    is_fit: bool = True

    @classmethod
    def plain(cls, heads: int, head_dim: int, device: torch.device) -> CodeSpace:
        """The space of a request with few keys."""
        center = torch.zeros(heads, head_dim, device=device)
        return cls(center, torch.ones_like(center), is_fit=False)

    @classmethod
    def fit(cls, keys: torch.Tensor) -> CodeSpace:
        """Measure keys [heads, n, head_dim], n >= 1. Ignores keys that are not finite.

        No host sync.
        """
        finite = keys.isfinite().all(-1, keepdim=True)
        keys = torch.where(finite, keys.float(), 0.0)
        count = finite.sum(1).clamp(min=1)
        center = keys.sum(1) / count
        off = torch.where(finite, keys - center[:, None], 0.0)
        width = (off.square().sum(1) / count).sqrt()
        largest = width.amax(-1, keepdim=True)
        # A constant dimension gets a width as well: later keys may differ there.
        least = torch.where(largest > 0, largest * _LEAST_WIDTH, 1.0)
        return cls(center, torch.maximum(width, least.clamp(min=1e-12)))


class CodeStore:
    """The codes of all requests, layers and KV heads of a worker.

    Args:
        num_pages: pages, numbered as those of the host tier.
        page_tokens: tokens per page.
        head_dim: elements per key.
        device: where codes lie; all of them are allocated at once.

    Attributes:
        page_bytes: bytes of the codes and scales of one page.
    """

    def __init__(
        self, num_pages: int, page_tokens: int, head_dim: int, device: torch.device
    ) -> None:
        self.page_bytes = page_tokens * (head_dim + 4)
        shape = num_pages, page_tokens
        self.keys = KeyCodes(
            torch.zeros(*shape, head_dim, dtype=torch.int8, device=device),
            torch.zeros(shape, device=device),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all codes and scales."""
        return int(self.keys.codes.nbytes + self.keys.scales.nbytes)

    def put(
        self, table: torch.Tensor, first: int, keys: torch.Tensor, space: CodeSpace
    ) -> None:
        """Store the codes of some tokens of a request and layer. No host sync.

        Args:
            table: int64 [heads, pages], its pages, on the device of the codes.
            first: number of the first token.
            keys: [heads, n, head_dim], on the device of the codes.
            space: of the request and layer.
        """
        size = self.keys.page_tokens
        token = torch.arange(first, first + keys.shape[1], device=keys.device)
        page = table.index_select(1, token // size)
        slot = (token % size).expand_as(page)
        codes, scales = encode_keys(keys, space.center, space.width)
        self.keys.codes[page, slot] = codes
        self.keys.scales[page, slot] = scales


@dataclass(frozen=True, slots=True)
class DeviceSelection:
    """How a device selects tokens itself: the optional object of a retrieval policy.

    Attributes:
        page_tokens: tokens per page of the host tier.
        setting: the setting that chose it, for messages.
        instead: the setting with which the host selects.
    """

    page_tokens: int
    setting: str
    instead: str

    def page_bytes(self, head_dim: int) -> int:
        """Device memory of the codes of one host page: head_dim + 4 per token."""
        return self.page_tokens * (head_dim + 4)

    def new_store(
        self, num_pages: int, head_dim: int, device: torch.device
    ) -> CodeStore:
        """Allocate the codes of all host pages."""
        return CodeStore(num_pages, self.page_tokens, head_dim, device)


class CodeScan(KeyIndex):
    """The codes of one request and layer, as an index: what a device would select.

    The engine keeps the codes of all requests in one :class:`CodeStore`. This class
    selects in the same way where there is no engine.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        self._space = CodeSpace.plain(num_heads, head_dim, torch.device("cpu"))
        self._first_keys = torch.empty(num_heads, 0, head_dim)
        self._codes, self._scales = encode_keys(
            self._first_keys, self._space.center, self._space.width
        )

    def append(self, keys: torch.Tensor, first: int) -> None:
        """See :meth:`KeyIndex.append`; keys may have any value."""
        if not self._space.is_fit:
            keys = torch.cat([self._first_keys, keys.float()], 1)
            self._codes, self._scales = self._codes[:, :0], self._scales[:, :0]
            self._first_keys = keys
            if keys.shape[1] >= FIT_KEYS:
                self._space = CodeSpace.fit(keys[:, :FIT_KEYS])
                self._first_keys = keys[:, :0]
        codes, scales = encode_keys(keys, self._space.center, self._space.width)
        self._codes = torch.cat([self._codes, codes], 1)
        self._scales = torch.cat([self._scales, scales], 1)

    def keep_first(self, tokens: int) -> int:
        """See :meth:`KeyIndex.keep_first`; 0 below the tokens that fit its space."""
        if self._space.is_fit and tokens < FIT_KEYS:
            return 0
        self._first_keys = self._first_keys[:, :tokens]
        self._codes, self._scales = self._codes[:, :tokens], self._scales[:, :tokens]
        return tokens

    def select(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """See :meth:`KeyIndex.select`; reads codes instead of ``keys``."""
        heads, tokens = self._scales.shape
        # One page per head.
        host = HostRequests(torch.arange(heads).view(1, -1, 1), torch.tensor([tokens]))
        votes = code_votes(
            queries[None],
            self._space.width[None],
            KeyCodes(self._codes, self._scales),
            host,
            scale,
        )[0]
        best = votes.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        chosen = best.new_full((heads, count), -1)
        chosen[:, : best.shape[1]] = best
        return chosen
