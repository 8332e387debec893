"""Common parts of the attention backends over the page heap.

Each (request, KV head) is a *flat sequence* with one KV head, its own page list and its
own length. A backend adds the kernel that attends to these sequences, and the layout of
a page.

Stock kernels need queries in *flat order*, sequence by sequence. Rows with one new
token already are in this order. Rows with several new tokens are reordered to (request,
head, token), and their outputs back::

    query  [token, head, group, dim]  ->  [row, head, token of row, group, dim]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from vllm_kvplugins.engine.heap import FP8_DTYPES, Fp8, Heap
from vllm_kvplugins.engine.page_table import FixedTable, FlatTable
from vllm_kvplugins.engine.probe_attention import LocalLayer, Reach
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.errors import coded, refuse
from vllm_kvplugins.ops.layout import PagedKV, PageLayout
from vllm_kvplugins.scoring.logits import LogitRules
from vllm_kvplugins.vllm_adapter.config.validation import (
    layer_problems,
    rotary_problems,
    split_problem,
)
from vllm_kvplugins.vllm_adapter.worker.context import (
    WorkerContext,
    context_of_layers,
)
from vllm_kvplugins.vllm_adapter.worker.output_weights import (
    output_weight_problems,
    output_weights_of,
)
from vllm_kvplugins.vllm_adapter.worker.probing import ProbeMetadata, probe_model
from vllm_kvplugins.vllm_adapter.worker.rotary import rotary_of


@dataclass
class Scope:
    """The page table of all layers that share it."""

    pages: torch.Tensor  # int32 [rows * kv_heads, max pages]
    lengths: torch.Tensor  # int32 [rows * kv_heads]
    schedule: Any = None  # the kernel's plan, if it needs one


def scopes_of(table: FlatTable) -> list[Scope]:
    """One scope for all layers, or one per layer."""
    return [Scope(*parts) for parts in zip(table.pages, table.lengths, strict=True)]


class FlatBuilder(ABC):
    """Mixin of metadata builders of layers that attend over page lists.

    Attributes:
        layers: the attention layers of the builder.
        context: context of the worker that these layers belong to.
    """

    vllm_config: Any
    layer_names: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layers = self._attention_layers(self.layer_names)
        self.context = context_of_layers(self.layers)
        self.runtime = self.context.runtime
        refuse(
            f"KV policy {self.runtime.policy.name!r} cannot run with this model",
            self._problems(),
        )

    def _attention_layers(self, names: Sequence[str]) -> list[Any]:
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, list(names))
        return [layers[name] for name in names]

    def _problems(self) -> list[str]:
        """Why the layers cannot attend over page lists."""
        return [
            problem
            for name, layer in zip(self.layer_names, self.layers, strict=True)
            for problem in layer_problems(name, layer, self.runtime.policy)
        ]

    @abstractmethod
    def page_layout(self, block_size: int, head_dim: int) -> PageLayout:
        """The layout of a page as this backend's kernel packs it."""

    @abstractmethod
    def begin_step(
        self, common: Any, into: FixedTable | None = None, dummy: bool = False
    ) -> FlatTable:
        """Page lists and lengths of the sequences of a forward pass.

        Args:
            into: the table to write to; None = new tensors.
            dummy: whether the step has no requests.
        """

    def _heap_of(self, layers: list[Any]) -> Heap:
        _, _, block_size, content = layers[0].kv_cache.shape
        return build_heap(layers, self.page_layout(block_size, content // 2))


class DraftBuilder(FlatBuilder):
    """Mixin of metadata builders of a drafter's layers.

    vLLM makes two of them: one next to the model's, and one that the drafter uses. The
    drafter's is made with the first layer, and gets the names of the others later.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context.draft_heap = self._draft_heap

    def _draft_heap(self) -> Heap:
        return self._heap_of(self._attention_layers(self.context.draft_layers))

    def begin_step(
        self, common: Any, into: FixedTable | None = None, dummy: bool = False
    ) -> FlatTable:
        self.context.ensure_heap()
        draft_layers, num_rows = self.runtime.draft_layers, common.num_reqs
        assert draft_layers is not None, "the heap was bound without draft layers"
        return draft_layers.build(
            [] if dummy else self.context.runner.draft_request_ids(common),
            common.seq_lens[:num_rows],
            common.block_table_tensor[:num_rows],
            self._longest_lens(common),
        )

    def _longest_lens(self, common: Any) -> list[int] | None:
        """Limits of the lengths on the host; None: unknown.

        vLLM's limit leaves out the token that was sampled last, which a draft model
        reads with the others.
        """
        limits = common.seq_lens_cpu_upper_bound
        if limits is None:
            return None
        more = self.vllm_config.num_speculative_tokens
        longest: list[int] = (limits[: common.num_reqs] + more).tolist()
        return longest


class PolicyBuilder(FlatBuilder):
    """Mixin of metadata builders: starts each step and binds the heap."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for index, layer in enumerate(self.layers):
            layer.impl.bind(self.runtime, index, layer)
        self.context.register_heap_binding(self._bind_heap)

    def _problems(self) -> list[str]:
        model, policy = self.context.runner.model, self.runtime.policy
        self.rotary = rotary_of(model, self.layers)
        self.output_weights = (
            output_weights_of(model, self.layers)
            if policy.needs_output_weights
            else None
        )
        return [
            *group_problems(self.layer_names, self.runtime),
            *self._local_problems(),
            *rotary_problems(policy, self.rotary),
            *output_weight_problems(policy, self.output_weights),
            *super()._problems(),
        ]

    def _local_problems(self) -> list[str]:
        """Whether probes can read the pages of layers without the policy."""
        if self.runtime.policy.probing is None:
            return []
        size, layers = self.layers[0].head_size, self._local_attention_layers()
        return [
            coded(
                "KVP040",
                f"layer {name} has heads of {layer.head_size} elements, and those with "
                f"full attention have {size}, so probes cannot read its pages; use "
                "another policy, such as snapkv",
            )
            for name, layer in layers.items()
            if layer.head_size != size
        ]

    def _local_attention_layers(self) -> dict[str, Any]:
        """The model's attention layers that the policy does not manage, by name."""
        skipped = {*self.layer_names, *self.context.draft_layers}
        return other_layers(self.vllm_config, skipped)

    def begin_step(
        self, common: Any, into: FixedTable | None = None, dummy: bool = False
    ) -> FlatTable:
        self.context.ensure_heap()
        num_rows = common.num_reqs
        return self.runtime.begin_step(
            [] if dummy else self.context.runner.rows(common),
            common.seq_lens[:num_rows],
            common.block_table_tensor[:num_rows],
            into,
        )

    def _bind_heap(self) -> None:
        """Give the heap to the runtime. vLLM allocates caches before the first step."""
        model = self.context.runner.model
        surprisal = self.context.new_surprisal_model
        heap = self._heap_of(self.layers)
        probes = self.runtime.policy.probing is not None
        others = self._local_attention_layers() if probes else {}
        local = {
            name: local_layer(layer, heap.layout) for name, layer in others.items()
        }
        make_draft_heap = self.context.draft_heap
        self.runtime.bind_heap(
            heap,
            [layer.impl.scale for layer in self.layers],
            self.rotary,
            probe_model(self.vllm_config, model, self.layer_names, local),
            surprisal(model) if self.runtime.policy.spans else None,
            [logit_rules(layer.impl) for layer in self.layers],
            None if make_draft_heap is None else make_draft_heap(),
            self.output_weights or (),
        )


class PolicyImpl(ABC):
    """Mixin of layers: attention through the flat page tables.

    Attributes:
        metadata_type: metadata of steps with a policy; with other metadata, the
            stock layer attends.
        attends_with_sinks, attends_with_softcap: whether ``attend`` implements them.
        stock_metadata: of the last step in which the stock layer attended.
    """

    metadata_type: type[Any]
    stock_metadata: Any = None
    attends_with_sinks = False
    attends_with_softcap = False

    def bind(self, runtime: PolicyRuntime, layer_index: int | None, layer: Any) -> None:
        """Called once, before the first step.

        Args:
            layer_index: among the layers that the policy manages; None: a layer of a
                drafter.
        """
        self.runtime = runtime
        self.layer_index = layer_index

    @property
    def heap(self) -> Heap:
        """The heap with the pages of this layer."""
        heap, draft_layers = self.runtime.heap, self.runtime.draft_layers
        if self.layer_index is None:
            assert draft_layers is not None, "no step has begun"
            return draft_layers.heap
        assert heap is not None, "no step has begun"
        return heap

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """Run the kernel; write its result to ``output``."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Always False: ``attend`` does not apply an output scale."""
        return False

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if isinstance(attn_metadata, ProbeMetadata):
            output[:] = self._probe(attn_metadata, query, key, value)
            return output
        if not isinstance(attn_metadata, self.metadata_type):
            self.stock_metadata = attn_metadata
            stock: torch.Tensor = super().forward(  # type: ignore[misc]
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                *args,
                **kwargs,
            )
            return stock
        runtime = self.runtime
        if self.layer_index is None:
            self.attend(query, kv_cache, attn_metadata, output)
            return output
        runtime.before_layer(self.layer_index, query)
        attending = runtime.attending
        if attending is None or not attending.attends_all(self.layer_index):
            self.attend(query, kv_cache, attn_metadata, output)
        if attending is not None:
            scope, pages = self.scope(kv_cache, attn_metadata)
            attending.attend(
                self.layer_index,
                query,
                PagedKV(pages, self.heap.layout),
                scope.pages,
                scope.lengths,
                output,
            )
        runtime.after_layer(self.layer_index, query)
        return output

    def _probe(
        self,
        metadata: ProbeMetadata,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """The attention of running probes, [tokens, num_q_heads, head_dim]."""
        context: WorkerContext = self.kv_policy_context  # type: ignore[attr-defined]
        prober = context.runtime.prober
        assert prober is not None
        if metadata.local is not None:
            return prober.attend_local(metadata.local, query, key, value)
        assert self.layer_index is not None, "a probe ran a draft layer"
        return prober.attend(self.layer_index, query, key, value)

    def scope(
        self, kv_cache: torch.Tensor, metadata: Any
    ) -> tuple[Scope, torch.Tensor]:
        """This layer's page table, and the pages that its page ids refer to."""
        if len(metadata.scopes) == 1:
            return metadata.scopes[0], kv_cache.flatten(0, 1).flatten(1)
        assert self.layer_index is not None, "draft layers share one scope"
        return metadata.scopes[self.layer_index], self.heap.pages


def logit_rules(impl: Any) -> LogitRules:
    """What a layer does to logits besides scaling."""
    sinks = None if impl.sinks is None else impl.sinks.detach().float()
    return LogitRules(sinks, float(impl.logits_soft_cap or 0))


def other_layers(vllm_config: Any, skipped: Set[str]) -> dict[str, Any]:
    """The attention layers of the process, without some of them, by name."""
    layers = get_layers_from_vllm_config(vllm_config, Attention)
    return {name: layer for name, layer in layers.items() if name not in skipped}


def local_layer(layer: Any, layout: PageLayout) -> LocalLayer:
    """One attention layer that the policy does not manage, as probes read it.

    Args:
        layout: of the pages of the layers that the policy manages.
    """
    cache, impl = layer.kv_cache, layer.impl
    num_blocks, num_kv_heads = cache.shape[:2]
    assert cache[0, 0].numel() == layout.page_elems, "the builder has checked the heads"
    pages = cache.view(num_blocks * num_kv_heads, layout.page_elems)
    if layer.kv_cache_dtype in FP8_DTYPES:
        pages = pages.view(torch.uint8)

    def blocks(first_query: int) -> torch.Tensor:
        step = impl.stock_metadata
        row = int(torch.searchsorted(step.query_start_loc, first_query, right=True))
        ids: torch.Tensor = step.block_table[row - 1].long()
        return ids

    reach = Reach(
        layer.sliding_window or 0, getattr(layer, "attention_chunk_size", None) or 0
    )
    heap = Heap(pages, layout, 1, num_blocks, num_kv_heads, fp8_of([layer]))
    return LocalLayer(heap, blocks, reach, impl.scale, logit_rules(impl))


def group_problems(layer_names: list[str], runtime: PolicyRuntime) -> list[str]:
    """Whether vLLM has split the layers that the policy manages."""
    in_group, count = len(layer_names), runtime.geometry.num_layers
    return [] if in_group == count else [split_problem(-(-count // in_group))]


def build_heap(layers: list[Any], layout: PageLayout) -> Heap:
    """The KV caches of all layers as one array of pages.

    Raises:
        KVPolicyError: the caches are not evenly spaced slices of one allocation.
    """
    caches = [layer.kv_cache for layer in layers]
    first = caches[0]
    num_blocks, num_kv_heads, block_size, content = first.shape
    page_elems = block_size * content
    layer_elems = num_blocks * num_kv_heads * page_elems
    is_even = all(
        cache.shape == first.shape
        and cache.is_contiguous()
        and cache.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and cache.storage_offset() == first.storage_offset() + i * layer_elems
        for i, cache in enumerate(caches)
    )
    refuse(
        "a KV policy cannot use these KV caches",
        []
        if is_even
        else [
            coded(
                "KVP202",
                f"the KV caches of the {len(caches)} layers are not slices of one "
                "allocation in layer order; use vLLM 0.32 or 0.33, and a model with "
                "one KV cache group",
            )
        ],
    )
    pages = torch.as_strided(
        first,
        (len(caches) * num_blocks * num_kv_heads, page_elems),
        (page_elems, 1),
        first.storage_offset(),
    )
    fp8 = fp8_of(layers)
    if fp8 is not None:
        pages = pages.view(torch.uint8)
    return Heap(pages, layout, len(caches), num_blocks, num_kv_heads, fp8)


def fp8_of(layers: list[Any]) -> Fp8 | None:
    """How to read the caches of these layers; None: their elements are plain."""
    name = layers[0].kv_cache_dtype
    if name not in FP8_DTYPES:
        return None
    return Fp8(
        FP8_DTYPES[name],
        layers[0].dtype,
        tuple(layer._k_scale_float for layer in layers),
        tuple(layer._v_scale_float for layer in layers),
    )


def flat_queries(
    query_start: torch.Tensor, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where the queries of each flat sequence start, and their flat order.

    Args:
        query_start: int32 [rows + 1], on the host.

    Returns:
        int32 [rows * num_kv_heads + 1], on the host; and the result of
        :func:`flat_order`, or None if each row has one new token, because such queries
        already are in flat order.
    """
    lens = query_start[1:] - query_start[:-1]
    flat_lens = lens.repeat_interleave(num_kv_heads)
    start = torch.zeros(flat_lens.numel() + 1, dtype=torch.int32)
    torch.cumsum(flat_lens, 0, out=start[1:])
    if int(query_start[-1]) == lens.numel() == int((lens == 1).sum()):
        return start, None
    return start, flat_order(query_start.long(), num_kv_heads)


def flat_order(query_start: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Permutation from (token, head) to (row, head, token of the row).

    Args:
        query_start: int64 [rows + 1].

    Returns:
        int64 [tokens * num_kv_heads]; entry i is the index ``token * heads +
        head`` of query i in flat order.
    """
    lens = query_start[1:] - query_start[:-1]
    row = torch.repeat_interleave(torch.arange(lens.numel()), lens)
    token = torch.arange(row.numel()) - query_start[row]
    head = torch.arange(num_kv_heads)
    base = query_start[row] * num_kv_heads + token
    place = base[:, None] + head * lens[row][:, None]
    order = torch.empty(place.numel(), dtype=torch.int64)
    order[place.reshape(-1)] = torch.arange(place.numel())
    return order


def in_flat_order(
    query: torch.Tensor, out: torch.Tensor, order: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries in flat order, and the tensor for the kernel's output.

    Args:
        query: [tokens, num_q_heads, head_dim].
        out: [tokens * num_kv_heads, group, head_dim].
        order: from :func:`flat_queries`, on the device of the queries.

    Returns:
        Two [tokens * num_kv_heads, group, head_dim]. Without ``order``, the second is
        ``out``. With it, the second is a new tensor, and the caller copies it to
        ``out[order]``.
    """
    queries = query.reshape(out.shape)
    if order is None:
        return queries, out
    queries = queries[order]
    return queries, torch.empty_like(queries)
