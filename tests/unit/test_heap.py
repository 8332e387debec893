"""Reading fp8 pages."""

from __future__ import annotations

import pytest
import torch
from layouts import make_layout

from vllm_kvplugins.engine.heap import FP8_DTYPES, Fp8, Heap

LAYERS, BLOCKS, HEADS, BLOCK, DIM = 2, 3, 2, 4, 8


@pytest.mark.parametrize("name", FP8_DTYPES)
def test_fp8_pages_are_read_with_the_scales_of_their_layer(name):
    dtype = FP8_DTYPES[name]
    layout = make_layout("transposed", BLOCK, DIM, seed=1)
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(
        LAYERS * BLOCKS * HEADS, layout.page_elems, generator=generator
    )
    elements = values.to(dtype)
    fp8 = Fp8(dtype, torch.float32, (0.5, 2.0), (4.0, 0.25))
    shape = layout, LAYERS, BLOCKS, HEADS
    heap = Heap(elements.view(torch.uint8), *shape, fp8)
    plain = Heap(elements.float(), *shape)
    assert heap.bytes_per_token == plain.bytes_per_token // 4
    for layer in range(LAYERS):
        pages = heap.page_ids(torch.tensor([2, 0]))
        pages = pages[layer * HEADS : (layer + 1) * HEADS]
        keys, expected = heap.keys(layer, pages), plain.keys(layer, pages)
        assert torch.equal(keys, expected * fp8.key_scales[layer])
        assert torch.equal(
            heap.values(layer, pages),
            plain.values(layer, pages) * fp8.value_scales[layer],
        )
