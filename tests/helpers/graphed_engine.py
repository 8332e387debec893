"""An engine that replays graphs where vLLM would, on GPU backends.

vLLM's part is simulated, except for the decision which steps replay a graph. Attention,
page tables and compactions are the package's. Graphs are those of ``simulated_graph``.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from simulated_graph import SimulatedGraph
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.utils import get_uniform_decode_token_count

from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.vllm_adapter.attention import flash, flashinfer, flat, triton
from vllm_kvplugins.vllm_adapter.config import compat
from vllm_kvplugins.vllm_adapter.worker.context import WorkerContext

SEED = 20261122
LAYERS, KV_HEADS, GROUP, HEAD_DIM = 2, 2, 2, 16
BLOCK, BLOCKS, LONGEST, WIDTH = 16, 60, 256, 19
SIZES = (2, 4)
MODES = (CUDAGraphMode.NONE, CUDAGraphMode.FULL_AND_PIECEWISE)
KERNELS = {
    "triton": (triton.TritonPolicyBuilder, triton.TritonPolicyImpl),
    "flash": (flash.FlashPolicyBuilder, flash.FlashPolicyImpl),
    "flashinfer": (
        flashinfer.FlashInferPolicyBuilder,
        flashinfer.FlashInferPolicyImpl,
    ),
}


def attends_to_nothing(query: Any, kv_cache: Any, metadata: Any, output: Any) -> None:
    output.zero_()


def addresses(metadata: Any) -> list[int]:
    """Addresses of a step's tensors; a graph assumes that they do not change."""
    tensors = [*vars(metadata).values()]
    tensors += [part for scope in metadata.scopes for part in vars(scope).values()]
    tensors += getattr(metadata.scopes[0].schedule, "buffers", None) or []
    return [part.data_ptr() for part in tensors if isinstance(part, torch.Tensor)]


def bare_impl(cls: Any, kv_heads: int, group: int, head_dim: int) -> Any:
    """A layer without what its constructor asks the platform for."""
    impl = object.__new__(cls)
    vars(impl).update(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        num_queries_per_kv=group,
        head_size=head_dim,
        scale=head_dim**-0.5,
        alibi_slopes=None,
        sinks=None,
        sliding_window=(-1, -1),
        kv_sharing_target_layer_name=None,
        logits_soft_cap=None,
        vllm_flash_attn_version=3,
    )
    return impl


@dataclass
class ProbeRequest:
    """A request, and the step in which it starts."""

    prompt: int
    chunks: int
    begins: int
    answer: int
    computed: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.answer


def traffic(short: bool) -> dict[str, ProbeRequest]:
    if short:
        return {
            "a": ProbeRequest(81, 40, 0, 4),
            "b": ProbeRequest(70, 60, 0, 6),
            "late": ProbeRequest(97, 48, 6, 2),
        }
    return {
        "a": ProbeRequest(81, 40, 0, 34),
        "b": ProbeRequest(120, 60, 1, 22),
        "c": ProbeRequest(7, 60, 2, 30),
        "late": ProbeRequest(97, 48, 14, 12),
    }


def vllm_config(mode: CUDAGraphMode) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            mode=CompilationMode.VLLM_COMPILE,
            cudagraph_mode=mode,
            max_cudagraph_capture_size=max(SIZES),
            cudagraph_capture_sizes=list(SIZES),
            is_attention_compiled_piecewise=lambda: True,
            compile_sizes=[],
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=max(SIZES), max_num_batched_tokens=256
        ),
        model_config=SimpleNamespace(max_model_len=LONGEST, dtype=torch.float32),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        lora_config=None,
        num_speculative_tokens=0,
    )


class Engine:
    """Steps of a model with synthetic keys, values and queries, on one kernel."""

    def __init__(
        self, monkeypatch: Any, policy: Any, kernel: str, mode: Any, runner: str
    ) -> None:
        builder_cls, impl_cls = KERNELS[kernel]
        self.config = vllm_config(mode)
        self.runner = getattr(self, f"_runner_{runner}")()
        geometry = Geometry(BLOCK, LAYERS, KV_HEADS, 2 * LAYERS * KV_HEADS * 64)
        self.runtime = PolicyRuntime(policy, geometry)
        # NaN shows pages that were read but never written.
        shape = (LAYERS, BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_DIM)
        caches = torch.full(shape, torch.nan)
        self.impls = [
            bare_impl(impl_cls, KV_HEADS, GROUP, HEAD_DIM) for _ in range(LAYERS)
        ]
        layers = {
            str(i): SimpleNamespace(
                impl=impl, kv_cache=caches[i], kv_cache_dtype="auto"
            )
            for i, impl in enumerate(self.impls)
        }
        self.context = WorkerContext(self.runtime)
        self.context.runner = self.adapter = compat.runner_adapter(self.runner)
        self.context.bind_layers(layers.values())
        self.config.compilation_config.static_forward_context = layers
        with monkeypatch.context() as patch:
            patch.setattr(flat, "get_layers_from_vllm_config", lambda *_: layers)
            patch.setattr(flat, "rotary_of", lambda *args: None)
            device = torch.device("cpu")
            self.builder = builder_cls(None, list(layers), self.config, device)
        self.caches, self.turn = caches, 0
        self.slow = kernel == "triton"
        self.asked = traffic(self.slow)
        order = torch.randperm(
            BLOCKS - 1, generator=torch.Generator().manual_seed(SEED)
        )
        self.free = (order + 1).tolist()
        self.blocks: dict[str, list[int]] = {}
        shape = (LAYERS, 256, KV_HEADS * GROUP, HEAD_DIM)
        self.queries, self.out = torch.zeros(shape), torch.zeros(shape)
        self.graphs: dict[int, SimulatedGraph] = {}
        self.captured: dict[int, Any] = {}
        self.replays = self.refusals = 0

    def _runner_V1(self) -> Any:
        dispatcher = CudagraphDispatcher(self.config)
        dispatcher.initialize_cudagraph_keys(
            self.config.compilation_config.cudagraph_mode
        )
        return SimpleNamespace(
            model=None,
            input_batch=None,
            _dummy_run=lambda run: run(),
            cudagraph_dispatcher=dispatcher,
        )

    def _runner_V2(self) -> Any:
        states = SimpleNamespace(index_to_req_id={}, prompt_len=SimpleNamespace())
        return SimpleNamespace(
            model=None,
            req_states=states,
            kv_connector=SimpleNamespace(_disabled=False),
            gather_batch_req_state=self._gather,
        )

    def _gather(self, rows: list[tuple[str, int]], dummy_run: bool) -> Any:
        """Like vLLM:

        one token of a prompt, in a batch with others, counts as decoding.
        """
        count, longest = len(rows), max(new for _, new in rows)
        eligible = all(
            self.asked[name].computed >= self.asked[name].prompt
            or (new == 1 and self.asked[name].computed > 0)
            for name, new in rows
        )
        total = sum(new for _, new in rows)
        each = get_uniform_decode_token_count(count, total, longest, eligible)
        batch = SimpleNamespace(
            req_ids=[name for name, _ in rows], idx_mapping_np=self._indices(rows)
        )
        return batch, each

    def _indices(self, rows: list[tuple[str, int]]) -> Any:
        names = list(self.asked)
        return torch.tensor([names.index(name) for name, _ in rows]).numpy()

    # -- one step ------------------------------------------------------------

    def scheduled(self) -> list[tuple[str, int]]:
        """Requests and their new tokens; prompts run in steps of their own."""
        live = {
            name: one
            for name, one in self.asked.items()
            if one.begins <= self.turn and one.computed < one.total
        }
        reading = [n for n, one in live.items() if one.computed < one.prompt]
        rows = []
        for name in reading or live:
            one = live[name]
            new_tokens = min(one.chunks, one.prompt - one.computed) if reading else 1
            plan = self.runtime.plan(one.prompt)
            rows.append((name, plan.clip_chunk(one.computed, new_tokens)))
        return rows

    def replayed_rows(self, rows: list[tuple[str, int]]) -> int:
        """Rows of the graph that vLLM would replay; 0 = none."""
        padded = next((size for size in SIZES if size >= len(rows)), 0)
        dispatcher = getattr(self.runner, "cudagraph_dispatcher", None)
        uniform = max(new for _, new in rows) == 1
        if dispatcher is None:
            _, each = self.runner.gather_batch_req_state(rows, dummy_run=False)
            full = each == 1 and self.graphs
        else:
            mode, descriptor = dispatcher.dispatch(
                num_tokens=sum(new for _, new in rows), uniform_decode=uniform
            )
            full = mode == CUDAGraphMode.FULL
            assert not full or descriptor.num_reqs == padded
        self.refusals += bool(uniform and padded and self.graphs and not full)
        return padded if full else 0

    def tell(self, rows: list[tuple[str, int]]) -> None:
        """The batch description that a model runner passes to the dispatcher."""
        requests = [self.asked[name] for name, _ in rows]
        if hasattr(self.runner, "cudagraph_dispatcher"):
            self.runner.input_batch = SimpleNamespace(
                req_ids=[name for name, _ in rows],
                num_prompt_tokens=[one.prompt for one in requests] + [9],
                num_computed_tokens_cpu=[one.computed for one in requests] + [9],
            )
            return
        states = self.runner.req_states
        states.index_to_req_id = dict(enumerate(self.asked))
        every = list(self.asked.values())
        states.prompt_len.np = torch.tensor([one.prompt for one in every]).numpy()
        states.num_computed_tokens_np = torch.tensor(
            [one.computed for one in every]
        ).numpy()

    def common(self, rows: list[tuple[str, int]], padded: int = 0) -> Any:
        """Metadata padded as vLLM pads it: rows without tokens, of length 0."""
        more = max(padded - len(rows), 0)
        news = [new for _, new in rows] + [0] * more
        lens = [self.asked[name].computed + new for name, new in rows] + [0] * more
        start = torch.tensor([0, *news]).cumsum(0).int()
        table = torch.zeros(len(news), WIDTH, dtype=torch.int32)
        for i, (name, _) in enumerate(rows):
            blocks = self.blocks.setdefault(name, [])
            while len(blocks) * BLOCK < lens[i]:
                blocks.append(self.free.pop())
            table[i, : len(blocks)] = torch.tensor(blocks)
        return self._common(start, torch.tensor(lens).int(), table, rows, padded)

    def _common(self, start: Any, lens: Any, table: Any, rows: Any, padded: int) -> Any:
        return SimpleNamespace(
            num_reqs=len(lens),
            num_actual_tokens=padded or int(start[-1]),
            max_query_len=int(start.diff().max()),
            query_start_loc=start,
            query_start_loc_cpu=start,
            seq_lens=lens,
            seq_lens_cpu_upper_bound=lens,
            block_table_tensor=table,
            req_idx=self._indices(rows) if rows else None,
        )

    def capture(self) -> None:
        """Capture graphs as vLLM does at start-up, with dummy rows of one token."""
        for size in SIZES:
            inputs = self.dummy(size)
            with SimulatedGraph() as graph:
                self.forward(inputs, size)
            self.graphs[size], self.captured[size] = graph, inputs
        assert self.runtime.num_requests == 0

    def dummy(self, size: int) -> Any:
        """Metadata of dummy rows, numbered like requests."""
        start = torch.arange(size + 1).int()
        ones, nulls = torch.ones(size).int(), torch.zeros(size, WIDTH).int()
        common = self._common(start, ones, nulls, [], size)
        common.req_idx = torch.arange(size).numpy()
        self.caches[:, 0] = 1  # the null block, which no request may read
        return self.builder.build_for_cudagraph_capture(common)

    def idle(self) -> None:
        """A dummy step, as other data-parallel ranks need it."""
        self.dummy(max(SIZES))
        self.graphs[max(SIZES)].replay()

    def forward(self, metadata: Any, tokens: int, attends: bool = True) -> None:
        """Run all layers; skip prompt attention, slow in the interpreter."""
        for layer, impl in enumerate(self.impls):
            impl.attend = attends_to_nothing
            if attends:
                del impl.attend
            impl.forward(
                None,
                self.queries[layer, :tokens],
                None,
                None,
                self.caches[layer],
                metadata,
                self.out[layer, :tokens],
            )

    def write(self, rows: list[tuple[str, int]]) -> None:
        """Queries, keys and values of the step; they depend only on positions."""
        at = 0
        for name, new in rows:
            for position in range(
                self.asked[name].computed, self.asked[name].computed + new
            ):
                seed = zlib.crc32(f"{name} {position} {SEED}".encode())
                rng = torch.Generator().manual_seed(seed)
                heads = KV_HEADS * (GROUP + 2)
                draw = torch.randn(LAYERS, heads, HEAD_DIM, generator=rng)
                sizes = [KV_HEADS * GROUP, KV_HEADS, KV_HEADS]
                query, key, value = draw.split(sizes, 1)
                self.queries[:, at] = query
                block = self.blocks[name][position // BLOCK]
                slot = self.caches[:, block, :, position % BLOCK]
                slot[..., :HEAD_DIM], slot[..., HEAD_DIM:] = key, value
                at += 1

    def live(self) -> None:
        """Run all steps."""
        while self.scheduled():
            self.step()

    def step(self) -> torch.Tensor:
        """Attention outputs of all layers for the step's tokens."""
        rows = self.scheduled()
        tokens = sum(new for _, new in rows)
        self.tell(rows)
        padded = self.replayed_rows(rows)
        common = self.common(rows, padded)
        self.write(rows)
        metadata = self.builder.build(0, common)
        self.out.fill_(torch.nan)
        if padded:
            self.replays += 1
            assert addresses(metadata) == addresses(self.captured[padded])
            self.graphs[padded].replay()
            assert (self.out[:, tokens:padded] == 0).all(), "padding found something"
        else:
            self.forward(metadata, tokens, not self.slow or tokens == len(rows))
        self.runtime.end_step()
        self.runtime.check_integrity()
        for name, new in rows:
            one = self.asked[name]
            one.computed += new
            if one.computed == one.total:
                self.runtime.finish([name])
                self.free += self.blocks.pop(name)
        self.turn += 1
        return self.out[:, :tokens].clone()
