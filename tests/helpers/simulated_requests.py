"""Two requests under a policy, step by step, on a CPU or on a simulated GPU."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from fake_text import POSITIONS, encode, make_rotary
from policy_settings import configure, drop, policies_that, retrieve, shares_pages
from simulated_cuda import GpuTensor, SimulatedGPU

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine.heap import FP8_DTYPES, Fp8, Heap
from vllm_kvplugins.engine.probing import ProbeModel
from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.base import KVCachePolicy

SEED = 20261122
LAYERS, KV_HEADS, GROUP, HEAD_DIM = 3, 2, 2, 8
BLOCK, BLOCKS, WIDTH = 4, 81, 40
SETTINGS = {"budget": 24, "window": 3, "sinks": 2, "recent": 1, "chunk_size": 4}
SETTINGS |= {"hash_bits": 1, "future": 16, "allocator": "head-adaptive"}
PROMPTS = {"long": 61, "short": 45}
ANSWER, CHUNK = 9, 40


class Losses:
    """Surprisal with a few peaks."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def states(self, first: int, count: int) -> torch.Tensor:
        return self._life.here(torch.zeros(count, 2))

    def surprisal(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert states.device == self._life.device
        return (targets % 7 == 3) * 5.0 + targets % 4


class Life:
    """Two requests under a policy, on one device.

    Args:
        draft_layers: of a drafter with twice the KV heads; 0: there is no drafter.
        fp8: whether the elements of the cache are fp8, with another scale per layer.
        block: slots per page.
        prompts: tokens of each request's prompt.
    """

    def __init__(
        self,
        policy: dict[str, Any],
        device: torch.device,
        draft_layers: int = 0,
        fp8: bool = False,
        block: int = BLOCK,
        prompts: dict[str, int] = PROMPTS,
    ) -> None:
        print("seed", SEED)
        self.device = device
        rng = torch.Generator().manual_seed(SEED)
        self.rng = rng
        layout = PageLayout.interleaved(block, HEAD_DIM)
        shape = (LAYERS * BLOCKS * KV_HEADS, layout.page_elems)
        pages = torch.randn(shape, generator=rng)
        elements = None
        if fp8:
            pages = pages.to(FP8_DTYPES["fp8"]).view(torch.uint8)
            scales = tuple(2.0**-layer for layer in range(LAYERS))
            elements = Fp8(FP8_DTYPES["fp8"], torch.float32, scales, scales[::-1])
        pages = self.here(pages)
        heap = Heap(pages, layout.to(device), LAYERS, BLOCKS, KV_HEADS, elements)
        self.heap = heap
        self.draft_heap: Heap | None = None
        if draft_layers:
            shape = (draft_layers * BLOCKS * 2 * KV_HEADS, layout.page_elems)
            drafted = self.here(torch.randn(shape, generator=rng))
            self.draft_heap = Heap(
                drafted, layout.to(device), draft_layers, BLOCKS, 2 * KV_HEADS
            )
        element_bytes = 1 if fp8 else 4
        token_bytes = 2 * LAYERS * KV_HEADS * HEAD_DIM * element_bytes
        geometry = Geometry(
            block, LAYERS, KV_HEADS, token_bytes, HEAD_DIM, element_bytes
        )
        self.runtime = PolicyRuntime(parse_policy(policy), geometry)
        rotary = make_rotary(HEAD_DIM)
        for field in fields(rotary):
            value = getattr(rotary, field.name)
            if isinstance(value, torch.Tensor):
                object.__setattr__(rotary, field.name, self.here(value))
        model = ProbeModel(self._probe, encode, POSITIONS, max_tokens=128)
        scales = [HEAD_DIM**-0.5] * LAYERS
        own_rng = torch.Generator().manual_seed(SEED)
        weights = torch.randn(KV_HEADS * GROUP, HEAD_DIM, 24, generator=own_rng)
        weights = self.here(weights)
        self.runtime.bind_heap(
            heap,
            scales,
            rotary,
            model,
            Losses(self),
            draft_heap=self.draft_heap,
            output_weights=[lambda: weights] * LAYERS,
        )
        self.prompts = dict(prompts)
        self.computed = dict.fromkeys(prompts, 0)
        self.turns: dict[str, tuple[int, ...]] = {}
        order = (torch.randperm(BLOCKS - 1, generator=rng) + 1).int()
        self.tables = dict(zip(prompts, order.split(WIDTH), strict=True))
        for name, prompt in prompts.items():
            turns = self.runtime.policy.turns
            ends = turns is not None and turns.history_only
            self.turns[name] = (prompt - 3,) if ends else ()
            self.runtime.add_request(name, range(prompt), self.turns[name])

    @property
    def retrieval(self) -> Any:
        """The retrieval extension, the only one of the runtime."""
        (extension,) = self.runtime.extensions
        return extension

    @property
    def spans(self) -> Any:
        """The span extension, the only one of the runtime."""
        return self.retrieval

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.device.type == "cpu" else GpuTensor.of(tensor.clone())

    def _probe(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)  # of q, k and v
        assert token_ids.device == positions.device == self.device
        shape = (LAYERS, len(token_ids), sum(heads), HEAD_DIM)
        rng = torch.Generator().manual_seed(zlib.crc32(str(shape).encode()))
        for layer, tokens in enumerate(torch.randn(shape, generator=rng)):
            parts = [self.here(part) for part in tokens.split(heads, dim=1)]
            assert self.runtime.prober is not None
            self.runtime.prober.attend(layer, *parts)

    def rows(self) -> list[Row]:
        """New tokens of the next step:

        a prompt chunk for late requests, or one token for all.
        """
        rows: list[Row] = []
        prompts, done = self.prompts, self.computed
        late = [name for name, prompt in prompts.items() if done[name] < prompt]
        for name in late or prompts:
            plan = self.runtime._plan_of(name, prompts[name])
            new_tokens = min(CHUNK, prompts[name] - done[name]) if late else 1
            new = plan.clip_chunk(done[name], new_tokens)
            first = rows[-1].first_query + rows[-1].new_tokens if rows else 0
            rows.append(Row(name, prompts[name], done[name], new, first))
        return rows

    def step(self, rows: list[Row]) -> list[torch.Tensor]:
        """Page tables and lengths of a step, followed by all due compactions.

        With a drafter, those of its layers, too.
        """
        first = rows[-1].first_query + rows[-1].new_tokens
        table = self.here(torch.stack([self.tables[row.request_id] for row in rows]))
        lens = self.here(torch.tensor([row.after_tokens for row in rows]).int())
        flat, layers = self.runtime.begin_step(rows, lens, table), []
        for layer in range(LAYERS):
            shape = (first, KV_HEADS * GROUP, HEAD_DIM)
            queries = self.here(torch.randn(shape, generator=self.rng))
            self.runtime.before_layer(layer, queries)
            spans = self.runtime.attending
            if spans is not None:
                output = torch.zeros_like(queries)
                # One list of pages for all layers, or lists of pages of the heap.
                heap, scope = self.heap, layer if len(flat.pages) > 1 else 0
                kv = heap.kv if len(flat.pages) > 1 else heap.layers[layer]
                pages, lengths = flat.pages[scope], flat.lengths[scope]
                spans.attend(layer, queries, kv, pages, lengths, output)
                layers.append(output)
            self.runtime.after_layer(layer, queries)
        if self.runtime.draft_layers is not None:
            names = [row.request_id for row in rows]
            longest = [row.after_tokens + 2 for row in rows]
            drafts = self.runtime.draft_layers.build(names, lens, table, longest)
            layers += [drafts.pages, drafts.lengths]
        self.compacted = bool(self.runtime._due)
        self.runtime.end_step()
        self.runtime.check_integrity()
        self.computed |= {row.request_id: row.after_tokens for row in rows}
        return [flat.pages, flat.lengths, *layers]


def policies(do: Callable[[KVCachePolicy], bool]) -> list[dict[str, Any]]:
    report = []
    for name in policies_that(do):
        settings = dict(SETTINGS)
        if do is drop and not shares_pages(name):
            settings.pop("allocator")
        if do is retrieve:
            settings = {"budget": 12, "sinks": 2, "window": 8, "skip_layers": 1}
            settings |= {"host_memory": 4 << 20, "bits": 3, "page_tokens": 4}
        report.append(configure(name, settings))
    return report


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.numbers if isinstance(tensor, GpuTensor) else tensor


@contextmanager
def on(device: torch.device) -> Iterator[SimulatedGPU | None]:
    with SimulatedGPU() if device.type == "cuda" else nullcontext() as gpu:
        yield gpu


def without_inference_mode(monkeypatch, *methods: tuple[type, str]) -> None:
    """Disables inference mode, which does not support these tensors."""
    for owner, name in methods:
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
