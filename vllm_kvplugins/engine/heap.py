"""The page heap: a worker's whole KV cache as one array of pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vllm_kvplugins.ops import dispatch as ops
from vllm_kvplugins.ops.layout import PagedKV, PageLayout

# By vLLM's names of caches with one scale per layer for keys and one for values.
FP8_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def unscaled(elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 values of fp8 elements, given as uint8, without their layer's scale."""
    return elements.view(dtype).float()


@dataclass(frozen=True, slots=True)
class Fp8:
    """How to read the elements of an fp8 cache. Moves copy them bit by bit.

    Attributes:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        read_dtype: dtype of dequantized keys and values.
        key_scales, value_scales: per layer; an element times its scale is the value.
    """

    dtype: torch.dtype
    read_dtype: torch.dtype
    key_scales: tuple[float, ...]
    value_scales: tuple[float, ...]

    def dequantized(self, elements: torch.Tensor, scale: float) -> torch.Tensor:
        """Values of fp8 elements, given as uint8."""
        return unscaled(elements, self.dtype).mul_(scale).to(self.read_dtype)


@dataclass(frozen=True, slots=True)
class Heap:
    """All pages of one worker.

    Attributes:
        pages: [num_layers * num_blocks * num_kv_heads, page_elems], page id
            ``(layer * num_blocks + block) * num_kv_heads + kv_head``.
        layout: where K and V of a slot lie inside a page.
        fp8: set if the pages are uint8 with fp8 elements.
        kv: pages and layout, for ops.
        layers: the same of each layer; page ids of a layer begin at 0.
    """

    pages: torch.Tensor
    layout: PageLayout
    num_layers: int
    num_blocks: int
    num_kv_heads: int
    fp8: Fp8 | None = None
    kv: PagedKV = field(init=False, repr=False)
    layers: tuple[PagedKV, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        expected = self.num_layers * self.num_blocks * self.num_kv_heads
        if self.pages.shape != (expected, self.layout.page_elems):
            raise ValueError(
                f"heap of {tuple(self.pages.shape)} is not {expected} pages of "
                f"{self.layout.page_elems} elements"
            )
        object.__setattr__(self, "kv", PagedKV(self.pages, self.layout))
        layer_pages = self.pages.split(self.num_blocks * self.num_kv_heads)
        layers = tuple(PagedKV(pages, self.layout) for pages in layer_pages)
        object.__setattr__(self, "layers", layers)

    @property
    def rows(self) -> int:
        """(layer, KV head) pairs, in the order of page ids."""
        return self.num_layers * self.num_kv_heads

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values, in all layers and KV heads here."""
        return int(2 * self.rows * self.layout.head_dim * self.pages.itemsize)

    def read_scales(self, layer: int) -> tuple[float, float]:
        """What elements of keys and values are multiplied by: 1 unless they are fp8."""
        if self.fp8 is None:
            return 1.0, 1.0
        return self.fp8.key_scales[layer], self.fp8.value_scales[layer]

    def unscaled(self, elements: torch.Tensor) -> torch.Tensor:
        """Keys or values as they are in the cache; fp8 elements become float32, without
        the scale of their layer."""
        return elements if self.fp8 is None else unscaled(elements, self.fp8.dtype)

    def as_elements(self, kv: PagedKV) -> PagedKV:
        """Pages of the heap for operations that compute with them: fp8 elements have
        their own dtype, and not uint8.

        Args:
            kv: all pages, or those of a layer.
        """
        if self.fp8 is None:
            return kv
        return PagedKV(kv.pages.view(self.fp8.dtype), kv.layout)

    def page_ids(self, blocks: torch.Tensor) -> torch.Tensor:
        """int64 [rows, blocks]: the pages of these blocks."""
        layer = torch.arange(self.num_layers, device=blocks.device)[:, None, None]
        head = torch.arange(self.num_kv_heads, device=blocks.device)[None, :, None]
        ids = (layer * self.num_blocks + blocks.long()) * self.num_kv_heads + head
        return ids.reshape(self.rows, blocks.numel())

    def keys(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Keys of whole pages of a layer, dequantized.

        Args:
            pages: int64 [heads, pages].

        Returns:
            [heads, pages * block_size, head_dim].
        """
        keys = ops.gather_keys(self.kv, pages)
        if self.fp8 is None:
            return keys
        return self.fp8.dequantized(keys, self.fp8.key_scales[layer])

    def values(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Values of whole pages of a layer; see :meth:`keys`."""
        values = ops.gather_values(self.kv, pages)
        if self.fp8 is None:
            return values
        return self.fp8.dequantized(values, self.fp8.value_scales[layer])

    # Called outside of a step, and pages may be a view that a step made.
    @torch.inference_mode()
    def clear(self, blocks: torch.Tensor) -> None:
        """Zero all keys and values of these blocks."""
        self.pages.index_fill_(0, self.page_ids(blocks).reshape(-1), 0)
