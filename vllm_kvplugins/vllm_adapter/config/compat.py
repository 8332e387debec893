"""All access to private parts of vLLM; ``seams`` lists them for the start-up check."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.errors import coded, refuse
from vllm_kvplugins.vllm_adapter.config.seams import all_seams

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

KNOWN_VERSIONS = ("0.32", "0.33")
# Attribute of vLLM's ModelConfig: ``max_positions`` before max_model_len was lowered.
_UNLIMITED = "kv_policy_max_positions"
_REMEDY = f"reinstall vLLM ({' or '.join(KNOWN_VERSIONS)}) or update vllm_kvplugins"


def vllm_version() -> str:
    """Version of the installed vLLM, such as ``0.32.0``."""
    import vllm

    return str(vllm.__version__)


def problems() -> list[str]:
    """Reasons why this vLLM cannot be used: unknown version, changed seams."""
    version = vllm_version()
    match = re.match(r"(\d+\.\d+)(?!\d)", version)
    if match is None or match[1] not in KNOWN_VERSIONS:
        return [
            coded(
                "KVP001",
                f"vLLM {version} is not supported; install one of "
                f"{', '.join(KNOWN_VERSIONS)}",
            )
        ]
    from vllm.platforms import current_platform

    return [
        coded("KVP002", f"vLLM {version}: {problem}; {_REMEDY}")
        for seam in all_seams(current_platform.is_cpu())
        for problem in seam.problems()
    ]


def forget_previous_engine() -> None:
    """Clear the per-process state that an earlier engine left in vLLM.

    vLLM caches the selected attention backend and the worker's KV connector per
    process. Without this, the next engine would get the connector of the previous one.
    """
    from vllm.distributed.kv_transfer.kv_transfer_state import (
        ensure_kv_transfer_shutdown,
    )
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()
    ensure_kv_transfer_shutdown()


def kv_element_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of one cached element."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    name = vllm_config.cache_config.cache_dtype
    dtype = (
        vllm_config.model_config.dtype
        if name == "auto"
        else STR_DTYPE_TO_TORCH_DTYPE[name]
    )
    return int(torch.empty(0, dtype=dtype).element_size())


def align_block_size(vllm_config: VllmConfig) -> None:
    """Enlarge the blocks of a recurrent model as vLLM does when it is loaded."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import AttentionBackend

    # The backend adds no condition of its own: the kernels under a policy need a
    # multiple of what the configured block size already is a multiple of.
    current_platform._align_hybrid_block_size(vllm_config, AttentionBackend)


def without_checkpoints(spec: Any) -> Any:
    """The spec of a layer that stores no state inside of a chunk of prefill.

    vLLM then ends a chunk where it wants a state for its prefix cache. With checkpoints
    it reads the state from the scan of Mamba-2, whose kernel for CPUs returns the last
    one only: vLLM 0.32 fails with an IndexError.
    """
    if not getattr(spec, "num_prefill_checkpoint_blocks", 0):
        return spec
    return replace(
        spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None
    )


def max_positions(vllm_config: VllmConfig) -> int:
    """Number of token positions that the model supports, not max_model_len."""
    model = vllm_config.model_config
    trained = getattr(model.hf_text_config, "max_position_embeddings", None) or 0
    before = getattr(model, _UNLIMITED, 0)
    return max(int(trained), int(model.max_model_len), int(before))


def left_open_max_model_len(model: Any) -> bool:
    """Whether the user set no ``--max-model-len``, or ``auto``."""
    return getattr(model, "original_max_model_len", 0) in (None, -1)


def fits_max_model_len(model: Any) -> bool:
    """Whether vLLM lowers ``max_model_len`` to what the pool holds
    (``--max-model-len auto``)."""
    return bool(getattr(model, "original_max_model_len", 0) == -1)


def lower_max_model_len(vllm_config: VllmConfig, max_model_len: int) -> None:
    """Limit the length of sequences; ``max_positions`` stays the same."""
    model = vllm_config.model_config
    setattr(model, _UNLIMITED, max_positions(vllm_config))
    model.max_model_len = max_model_len


def prefix_hit(
    kv_cache_manager: Any, request: Any, max_tokens: int
) -> tuple[Any, int, int]:
    """Look up a request's prefix-cache hit of at most ``max_tokens`` tokens.

    Returns:
        As vLLM's ``get_computed_blocks``: the blocks of each group; number of tokens;
        end of a longer prefix that some groups have cached, 0 if none.
    """
    groups, tokens, more = kv_cache_manager.coordinator.find_longest_cache_hit(
        request.block_hashes, max_tokens
    )
    blocks = kv_cache_manager.create_kv_cache_blocks(groups)
    return blocks, tokens, tokens + more if more else 0


def drops_last_block(vllm_config: VllmConfig) -> bool:
    """Whether vLLM drops the last block of a prefix-cache hit.

    It does for drafters that continue with the model's hidden states, which the prefix
    cache does not store.
    """
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.use_eagle_block_drop())


def whole_prefix_hit(
    kv_cache_manager: Any, request: Any, max_tokens: int
) -> tuple[Any, int]:
    """A request's prefix-cache hit, with the block that vLLM drops.

    There is one group of KV caches: a drafter with a cache next to others is refused.

    Returns:
        The blocks; number of tokens.
    """
    (manager,) = kv_cache_manager.coordinator.single_type_managers
    groups, tokens = manager.find_longest_cache_hit(
        block_hashes=request.block_hashes,
        max_length=max_tokens,
        kv_cache_group_ids=[0],
        block_pool=kv_cache_manager.block_pool,
        kv_cache_spec=manager.kv_cache_spec,
        drop_eagle_block=False,
        alignment_tokens=manager.block_size,
    )
    return kv_cache_manager.create_kv_cache_blocks(groups), tokens


# Whether the layers must run the runtime's host code in a step with these rows.
NeedsLayers = Callable[[Sequence[Row]], bool]

# -- model runners ---------------------------------------------------------------


class RunnerV1:
    """Rows of a step as model runner V1 keeps them.

    Attributes:
        draft_tokens: drafts of the step by request, if it has any.
    """

    needs = ("input_batch", "_dummy_run")

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.draft_tokens: Mapping[str, int] = {}
        # The metadata of a dummy batch shows its rows as the runner's requests, and
        # only a device sync would tell them apart.
        self._in_dummy_run = False
        run = runner._dummy_run

        @functools.wraps(run)
        def dummy_run(*args: Any, **kwargs: Any) -> Any:
            self._in_dummy_run = True
            try:
                return run(*args, **kwargs)
            finally:
                self._in_dummy_run = False

        runner._dummy_run = dummy_run
        self._needs_layers: NeedsLayers | None = None

    @property
    def model(self) -> torch.nn.Module:
        """The loaded model."""
        return self._runner.model

    def request_ids(self, metadata: CommonAttentionMetadata) -> list[str]:
        """The step's requests in batch order; none in a dummy batch."""
        if self._in_dummy_run:
            return []
        names: list[str] = self._runner.input_batch.req_ids[: metadata.num_reqs]
        return names

    def draft_request_ids(self, metadata: CommonAttentionMetadata) -> list[str]:
        """The requests of a forward pass of the drafter."""
        return self.request_ids(metadata)

    def rows(self, metadata: CommonAttentionMetadata) -> list[Row]:
        """The rows of ``request_ids``."""
        prompt_tokens = self._runner.input_batch.num_prompt_tokens
        request_ids = self.request_ids(metadata)
        return _rows(metadata, request_ids, prompt_tokens, self.draft_tokens)

    def replace_generators(
        self, replacement: Callable[[torch.Generator], torch.Generator]
    ) -> None:
        """Replace the random generators of the requests in the batch that have one."""
        batch, requests = self._runner.input_batch, self._runner.requests
        for index, generator in batch.generators.items():
            new = batch.generators[index] = replacement(generator)
            requests[batch.req_ids[index]].generator = new  # for after a preemption

    def forbid_full_graphs(self, needs_layers: NeedsLayers) -> None:
        """Prevent replay of full graphs in steps that need host code.

        vLLM treats a prefill chunk of one token as a decode step, so a step that looks
        uniform may need host code. A later call replaces the check.
        """
        first, self._needs_layers = self._needs_layers is None, needs_layers
        if not first:
            return
        from vllm.config import CUDAGraphMode

        dispatcher = self._runner.cudagraph_dispatcher
        dispatch = dispatcher.dispatch

        @functools.wraps(dispatch)
        def checked(*args: Any, uniform_decode: bool = False, **kwargs: Any) -> Any:
            if uniform_decode and not self._in_dummy_run:
                assert self._needs_layers is not None
                if self._needs_layers(self._decode_rows()):
                    others = kwargs.get("invalid_modes") or set()
                    kwargs["invalid_modes"] = {CUDAGraphMode.FULL, *others}
            return dispatch(*args, uniform_decode=uniform_decode, **kwargs)

        dispatcher.dispatch = checked

    def _decode_rows(self) -> list[Row]:
        """Rows of a decode step, before its metadata exists."""
        batch = self._runner.input_batch
        return [
            _decode_row(name, int(prompt), int(computed), self.draft_tokens)
            for name, prompt, computed in zip(
                batch.req_ids,
                batch.num_prompt_tokens,
                batch.num_computed_tokens_cpu,
                strict=False,  # the arrays are longer than the batch
            )
        ]


class RunnerV2:
    """Rows of a step as model runner V2 keeps them.

    Attributes:
        draft_tokens: drafts of the step by request, if it has any.
    """

    needs = ("req_states", "kv_connector")

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.draft_tokens: Mapping[str, int] = {}
        self._needs_layers: NeedsLayers | None = None
        self._newest: list[str] = []  # requests of the model's last forward pass

    @property
    def model(self) -> torch.nn.Module:
        """The loaded model."""
        return self._runner.model

    def request_ids(self, metadata: CommonAttentionMetadata) -> list[str]:
        """The step's requests in batch order; none in a dummy batch."""
        states = self._runner.req_states
        indices = metadata.req_idx
        if indices is None or self._is_dummy():
            return []
        if any(int(i) not in states.index_to_req_id for i in indices):
            return []  # warm-up
        self._newest = [states.index_to_req_id[int(i)] for i in indices]
        return self._newest

    def draft_request_ids(self, metadata: CommonAttentionMetadata) -> list[str]:
        """The requests of a forward pass of the drafter.

        The drafter reuses the model's metadata for its first pass. It builds that of
        later passes itself and does not number the rows, whose order is the same.
        """
        if metadata.req_idx is not None:
            return self.request_ids(metadata)
        return [] if self._is_dummy() else self._newest

    def _is_dummy(self) -> bool:
        """Whether a dummy batch or warm-up is running.

        V2 numbers their rows like requests, but disables the connector meanwhile.
        """
        return bool(getattr(self._runner.kv_connector, "_disabled", True))

    def rows(self, metadata: CommonAttentionMetadata) -> list[Row]:
        """The rows of ``request_ids``."""
        request_ids = self.request_ids(metadata)
        if not request_ids:
            return []
        prompt_tokens = self._runner.req_states.prompt_len.np[metadata.req_idx]
        return _rows(metadata, request_ids, prompt_tokens, self.draft_tokens)

    def replace_generators(
        self, replacement: Callable[[torch.Generator], torch.Generator]
    ) -> None:
        """Do nothing: V2 derives random numbers from a request's seed and position."""

    def forbid_full_graphs(self, needs_layers: NeedsLayers) -> None:
        """Prevent replay of full graphs in steps that need host code.

        vLLM treats a prefill chunk of one token as a decode step, so a step that looks
        uniform may need host code. A later call replaces the check.
        """
        first, self._needs_layers = self._needs_layers is None, needs_layers
        if not first:
            return
        gather = self._runner.gather_batch_req_state

        @functools.wraps(gather)
        def checked(*args: Any, **kwargs: Any) -> Any:
            batch, tokens_each = gather(*args, **kwargs)
            if batch is not None and tokens_each is not None:
                assert self._needs_layers is not None
                if self._needs_layers(self._decode_rows(batch)):
                    tokens_each = None  # vLLM then treats it as a prefill batch
            return batch, tokens_each

        self._runner.gather_batch_req_state = checked

    def _decode_rows(self, batch: Any) -> list[Row]:
        """Rows of a decode step, before its metadata exists."""
        states, indices = self._runner.req_states, batch.idx_mapping_np
        prompts = states.prompt_len.np[indices]
        computed = states.num_computed_tokens_np[indices]
        return [
            _decode_row(name, int(prompts[i]), int(computed[i]), self.draft_tokens)
            for i, name in enumerate(batch.req_ids)
        ]


def _decode_row(
    request_id: str,
    prompt_tokens: int,
    computed_tokens: int,
    draft_tokens: Mapping[str, int],
) -> Row:
    """The row of a request that computes one token and its drafts.

    Nobody reads ``first_query``, which is not known yet.
    """
    drafts = draft_tokens.get(request_id, 0)
    return Row(request_id, prompt_tokens, computed_tokens, 1 + drafts, 0, drafts)


def _rows(
    metadata: CommonAttentionMetadata,
    request_ids: list[str],
    prompt_tokens: Any,
    draft_tokens: Mapping[str, int],
) -> list[Row]:
    """Rows of the requests of a step, without padding."""
    starts = metadata.query_start_loc_cpu.tolist()
    # Exact, because asynchronous scheduling is off under speculative decoding;
    # otherwise an upper bound.
    assert metadata.seq_lens_cpu_upper_bound is not None
    seq_lens = metadata.seq_lens_cpu_upper_bound.tolist()
    return [
        Row(
            request_id=request_id,
            prompt_tokens=int(prompt_tokens[i]),
            computed_tokens=seq_lens[i] - (starts[i + 1] - starts[i]),
            new_tokens=starts[i + 1] - starts[i],
            first_query=starts[i],
            draft_tokens=draft_tokens.get(request_id, 0),
        )
        for i, request_id in enumerate(request_ids)
    ]


def runner_adapter(runner: Any) -> RunnerV1 | RunnerV2:
    """The adapter for this worker's model runner.

    Raises:
        KVPolicyError: the runner lacks what the adapter reads.
    """
    kind = RunnerV2 if hasattr(runner, "req_states") else RunnerV1
    name = type(runner).__name__
    refuse(
        f"a KV policy cannot follow vLLM {vllm_version()}'s {name}",
        [
            coded("KVP002", f"{name} no longer has {attribute}; {_REMEDY}")
            for attribute in kind.needs
            if not hasattr(runner, attribute)
        ],
    )
    return kind(runner)
