"""A KV connector that records every block it is shown, and can load blocks back.

It stores whole blocks in memory, under the tokens up to the end of each. Settings, in
``kv_connector_extra_config``:

    loads   "sync", "async" or "no"
    steps   an asynchronous load arrives after this many steps (1)
    keeps   save blocks when a request ends, and hold them until then
    broken  lists of tokens: loads of blocks that end there fail
    drafts  the engine may schedule drafts, which are left out; under a policy it must
            not show any
    folder  worker and scheduler are different processes: each rank writes what it saves
            into a file of this folder, and the scheduler notes which keys it sends
    source  such a folder of another engine, whose blocks can be loaded
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

Key = tuple[int, ...]
# Block contents by key and layer. Lives as long as the process.
STORE: dict[Key, dict[str, Any]] = {}
# Keys in the stores of the workers, if they are other processes.
SENT: set[Key] = set()


@dataclass
class Seen:
    """What all instances of this process were shown, and did."""

    saves: list[tuple[Key, int]] = field(default_factory=list)  # key, block ID
    contents: list[tuple[Key, dict[str, Any]]] = field(default_factory=list)
    offered: list[tuple[str, list[int]]] = field(default_factory=list)  # to load into
    finished: dict[str, list[int]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)  # tokens of requests, as shown
    loads: int = 0
    released: int = 0
    layers: int = 0  # saves of single layers
    late: int = 0  # calls for single layers after all blocks of the step were saved


SEEN = Seen()


@dataclass
class Transfer:
    request: str
    keys: list[Key]
    blocks: list[int]


@dataclass
class StoreMetadata(KVConnectorMetadata):
    saves: list[Transfer]
    loads: list[Transfer]
    kept: list[Transfer]


def _rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _file_of_rank(rank: int) -> str:
    return f"rank{rank}.pt"


class StoreConnector(KVConnectorBase_V1):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self._kv_transfer_config.kv_connector_extra_config
        self._loads = settings.get("loads", "sync")
        self._steps = settings.get("steps", 1)
        self._keeps = settings.get("keeps", False)
        self._broken = settings.get("broken", [])
        self._drafts = settings.get("drafts", False)
        self._folder = settings.get("folder")
        if source := settings.get("source"):
            self._read(Path(source))
        self._size = self._vllm_config.cache_config.block_size
        # scheduler
        self._requests: dict[str, Any] = {}
        self._tables: dict[str, list[int]] = {}
        self._saved: dict[str, int] = {}
        self._to_load: list[Transfer] = []
        self._to_keep: list[Transfer] = []
        # worker
        self._caches: dict[str, Any] = {}
        self._arriving: list[tuple[int, Transfer]] = []  # steps to go
        self._sent: set[str] = set()
        self._invalid: set[int] = set()
        self._has_saved = False

    # -- scheduler ----------------------------------------------------------------

    def _key(self, request: Any, block: int) -> Key:
        return tuple(request.all_token_ids[: (block + 1) * self._size])

    def _has(self, request: Any, block: int) -> bool:
        key = self._key(request, block)
        return key in STORE or key in SENT

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        if self._loads == "no":
            return 0, False
        SEEN.lengths.append(request.num_tokens)
        assert len(request.all_token_ids) == request.num_tokens
        first = block = num_computed_tokens // self._size
        while (block + 1) * self._size < request.num_tokens:
            if not self._has(request, block):
                break
            block += 1
        return (block - first) * self._size, block > first and self._loads == "async"

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        (ids,) = blocks.get_block_ids()
        if not num_external_tokens:
            return
        SEEN.offered.append((request.request_id, list(ids)))
        # The newest blocks of the prefix that is found.
        count = num_external_tokens // self._size
        stop = 0
        while (stop + 1) * self._size < request.num_tokens and (
            self._has(request, stop)
        ):
            stop += 1
        keys = [self._key(request, block) for block in range(stop - count, stop)]
        self._to_load.append(
            Transfer(request.request_id, keys, list(ids[stop - count : stop]))
        )
        self._saved[request.request_id] = stop

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data

        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._tables[new.req_id] = []  # a resumed one, with model runner V2
        saves = []
        for request_id, groups, resumed in yield_req_data(scheduler_output):
            if resumed:
                self._tables[request_id] = []
            table = self._tables[request_id]
            table += groups[0] if groups else []
            end = computed[request_id]
            end += scheduler_output.num_scheduled_tokens[request_id]
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
            assert self._drafts or not drafts
            end -= len(drafts)
            stop = end // self._size
            start = min(self._saved.get(request_id, 0), stop)
            self._saved[request_id] = stop
            request = self._requests[request_id]
            keys = [self._key(request, block) for block in range(start, stop)]
            if keys and not self._keeps:
                if self._folder:
                    SENT.update(keys)
                saves.append(Transfer(request_id, keys, table[start:stop]))
        meta = StoreMetadata(saves, self._to_load, self._to_keep)
        self._to_load, self._to_keep = [], []
        return meta

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        SEEN.finished[request_id] = list(block_ids)
        self._requests.pop(request_id)
        self._tables.pop(request_id, None)
        self._saved.pop(request_id, None)
        full = min(len(block_ids), request.num_computed_tokens // self._size)
        if not (self._keeps and full):
            return False, None
        keys = [self._key(request, block) for block in range(full)]
        self._to_keep.append(Transfer(request_id, keys, list(block_ids[:full])))
        return True, None

    # -- worker -------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StoreMetadata)
        for load in meta.loads:
            if self._loads == "async":
                self._arriving.append((self._steps, load))
            else:
                self._load(load)
        for kept in meta.kept:
            self._save(kept)
            self._sent.add(kept.request)

    def _load(self, load: Transfer) -> None:
        SEEN.loads += len(load.keys)
        for key, block in zip(load.keys, load.blocks, strict=True):
            if len(key) in self._broken:
                self._invalid.add(block)
                continue
            for layer, cache in self._caches.items():
                cache[block] = STORE[key][layer]

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._has_saved = False

    def wait_for_layer_load(self, layer_name: str) -> None:
        SEEN.late += self._has_saved

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        SEEN.layers += 1
        SEEN.late += self._has_saved

    def wait_for_save(self) -> None:
        self._has_saved = True
        meta = self._get_connector_metadata()
        assert isinstance(meta, StoreMetadata)
        for save in meta.saves:
            self._save(save)
        if meta.saves and self._folder:
            self._write(Path(self._folder))

    def _read(self, folder: Path) -> None:
        """Fill the store of this rank; in the scheduler, note the keys."""
        is_worker = self.role == KVConnectorRole.WORKER
        contents = torch.load(folder / _file_of_rank(_rank() if is_worker else 0))
        if is_worker:
            STORE.update(contents)
        else:
            SENT.update(key for key, _ in contents)

    def _write(self, folder: Path) -> None:
        torch.save(SEEN.contents, folder / _file_of_rank(_rank()))

    def _save(self, save: Transfer) -> None:
        for key, block in zip(save.keys, save.blocks, strict=True):
            layers = {
                name: cache[block].clone() for name, cache in self._caches.items()
            }
            SEEN.saves.append((key, block))
            SEEN.contents.append((key, layers))
            STORE.setdefault(key, layers)

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        arrived = set()
        for steps, load in self._arriving:
            if steps == 1:
                self._load(load)
                arrived.add(load.request)
        self._arriving = [
            (steps - 1, load) for steps, load in self._arriving if steps > 1
        ]
        sent, self._sent = self._sent, set()
        SEEN.released += len(sent)
        return sent or None, arrived or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid
