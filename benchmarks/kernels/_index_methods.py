"""Methods to find the keys with the largest inner products, for ``index_peers.py``.

Each method has a ``name``, a ``knob`` that trades speed for coverage, the values to try
for it (``knobs``), and these calls:

    build()                  build the index of all heads; can be called again
    insert(more)             add keys [heads, n, head_dim] behind the others; only
                             ``Ours`` and ``GrowingLibrary``
    ready()                  finish after the last build or insert; not timed
    prepared(queries)        convert queries [heads, n, head_dim] for ``ask``
    ask(prepared, value)     int64 [heads, n, K], the slots found; -1 for none
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from index import placed

from vllm_kvplugins.index import BruteForceIndex, CodedIndex, DCIIndex, Keys
from vllm_kvplugins.index.compiled import CompiledIndex

# module: package to install
PACKAGES = {"hnswlib": "hnswlib", "faiss": "faiss-cpu", "scann": "scann"}
K = 64
# Keys of an insertion, a page that leaves the window, and number of insertions.
INSERTED, INSERTS = 16, 64


class Ours:
    """An index of this package: all heads in one call.

    Args:
        kind: "scan", "tree" or "codes".
        keys: float32 [heads, n, head_dim].
        dtype: of the indexed rows.
        settings: of the index.
    """

    kinds: ClassVar[dict[str, type[CompiledIndex]]] = {
        "scan": BruteForceIndex,
        "tree": DCIIndex,
        "codes": CodedIndex,
    }

    def __init__(
        self, kind: str, keys: torch.Tensor, dtype: torch.dtype, **settings: Any
    ) -> None:
        self.name = f"{kind} {str(dtype).removeprefix('torch.')}"
        self.knob = "" if kind == "scan" else "max_visits"
        self.knobs = [0] if kind == "scan" else steps(K, keys.shape[1])
        self.rows = keys.to(dtype)
        self.kind, self.settings = kind, settings

    def build(self) -> None:
        heads, _, dim = self.rows.shape
        self.index = self.kinds[self.kind](heads, dim, **self.settings)
        self.index.build(Keys.dense(self.rows))

    def insert(self, more: torch.Tensor) -> None:
        self.index.insert(Keys.dense(more))

    def ready(self) -> None:
        """Place the keys in the tree's order; not timed."""
        tree = isinstance(self.index, DCIIndex)
        self.keys = placed(self.index, self.rows) if tree else Keys.dense(self.rows)

    def prepared(self, queries: torch.Tensor) -> torch.Tensor:
        return queries.contiguous()

    def ask(self, queries: torch.Tensor, knob: int) -> torch.Tensor:
        return self.index.query_topk(queries, self.keys, K, knob).slots


class Library(ABC):
    """An index of another library: one per head, queried through a thread pool.

    Args:
        keys: float32 [heads, n, head_dim].
        module: the imported library.
        threads: number of heads to query at a time.
    """

    name = knob = ""

    def __init__(self, keys: torch.Tensor, module: Any, threads: int) -> None:
        self.module = module
        self.rows = [head.numpy() for head in keys]
        self.count, self.dim = keys.shape[1:]
        self.map: Callable[..., Iterator[Any]] = map
        if threads > 1:
            # in the pool's threads only: libraries share the settings of an OpenMP
            # runtime, and this package's index runs in the main thread
            self.map = ThreadPoolExecutor(threads, initializer=self.one_thread).map
        else:
            self.one_thread()

    def one_thread(self) -> None:  # noqa: B027  one library needs no setting
        """Make searches in the calling thread single-threaded."""

    def build(self) -> None:
        self.heads = list(self.map(self.build_head, self.rows))

    def ready(self) -> None:  # noqa: B027
        """Does nothing: the index is complete after build()."""

    def prepared(self, queries: torch.Tensor) -> list[Any]:
        return [head.contiguous().numpy() for head in queries]

    def ask(self, queries: list[Any], knob: int) -> torch.Tensor:
        query_head = partial(self.ask_head, knob=knob)
        results = list(self.map(query_head, self.heads, queries))
        return torch.stack([torch.from_numpy(slots) for slots in results])

    @abstractmethod
    def build_head(self, rows: Any) -> Any:
        """An index of one head's float32 rows [n, head_dim]."""

    @abstractmethod
    def ask_head(self, index: Any, queries: Any, knob: int) -> Any:
        """int64 [n, K], the slots found for one head's queries."""


class GrowingLibrary(Library):
    """A library that can add keys to an index."""

    def insert(self, more: torch.Tensor) -> None:
        rows = [head.contiguous().numpy() for head in more]
        list(self.map(self.insert_head, self.heads, rows))

    @abstractmethod
    def insert_head(self, index: Any, rows: Any) -> None:
        """Add float32 rows [n, head_dim] to one head's index."""


class Hnsw(GrowingLibrary):
    """hnswlib's graph, with the library's default degree and construction effort."""

    name, knob = "hnswlib", "ef"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.knobs = steps(K, min(8192, self.count))

    def build_head(self, rows: Any) -> Any:
        index = self.module.Index(space="ip", dim=self.dim)
        room = self.count + INSERTS * INSERTED
        index.init_index(max_elements=room, M=16, ef_construction=200)
        index.add_items(rows, num_threads=1)
        return index

    def insert_head(self, index: Any, rows: Any) -> None:
        index.add_items(rows, num_threads=1)

    def ask_head(self, index: Any, queries: Any, knob: int) -> Any:
        index.set_ef(knob)
        return index.knn_query(queries, K, num_threads=1)[0].astype("int64")


class IvfFlat(GrowingLibrary):
    """FAISS's inverted lists: 4 sqrt(n) lists, as its guidelines recommend."""

    name, knob = "faiss ivf-flat", "nprobe"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lists = round(4 * math.sqrt(self.count))
        self.knobs = steps(1, self.lists)

    def one_thread(self) -> None:
        self.module.omp_set_num_threads(1)

    def build_head(self, rows: Any) -> Any:
        metric = self.module.METRIC_INNER_PRODUCT
        coarse = self.module.IndexFlatIP(self.dim)
        index = self.module.IndexIVFFlat(coarse, self.dim, self.lists, metric)
        # avoids FAISS's warning about short contexts
        index.cp.min_points_per_centroid = 1
        index.train(rows)
        index.add(rows)
        return index

    def insert_head(self, index: Any, rows: Any) -> None:
        index.add(rows)

    def ask_head(self, index: Any, queries: Any, knob: int) -> Any:
        index.nprobe = knob
        return index.search(queries, K)[1]


class IvfFastScan(IvfFlat):
    """FAISS's inverted lists of 4-bit codes, one per two dimensions.

    Codes are scored from registers, and the best eight times 64 keys again exactly.
    """

    name = "faiss ivf-pq fast-scan"

    def build_head(self, rows: Any) -> Any:
        metric = self.module.METRIC_INNER_PRODUCT
        coarse = self.module.IndexFlatIP(self.dim)
        index = self.module.IndexIVFPQFastScan(
            coarse, self.dim, self.lists, self.dim // 2, 4, metric
        )
        index.cp.min_points_per_centroid = 1
        exact = self.module.IndexRefineFlat(index)
        exact.k_factor = 8
        exact.train(rows)
        exact.add(rows)
        return exact

    def ask_head(self, index: Any, queries: Any, knob: int) -> Any:
        self.module.extract_index_ivf(index.base_index).nprobe = knob
        return index.search(queries, K)[1]


class Scann(Library):
    """ScaNN: a tree of lists, 4-bit codes per two dimensions, 256 exact scores.

    It adds keys only to an index that was built with a name for each key.
    """

    name, knob = "scann", "leaves"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.leaves = round(4 * math.sqrt(self.count))
        self.knobs = steps(1, self.leaves)

    def build_head(self, rows: Any) -> Any:
        builder = self.module.scann_ops_pybind.builder(rows, K, "dot_product")
        builder.set_n_training_threads(1)
        builder.tree(
            num_leaves=self.leaves,
            num_leaves_to_search=1,
            training_sample_size=self.count,
        )
        builder.score_ah(2, anisotropic_quantization_threshold=0.2)
        return builder.reorder(256).build()

    def ask_head(self, index: Any, queries: Any, knob: int) -> Any:
        found = index.search_batched(queries, leaves_to_search=knob)[0].astype("int64")
        missing = K - found.shape[1]  # few leaves may have fewer keys
        return np.pad(found, ((0, 0), (0, missing)), constant_values=-1)


# by module
LIBRARIES: dict[str, tuple[type[Library], ...]] = {
    "hnswlib": (Hnsw,),
    "faiss": (IvfFlat, IvfFastScan),
    "scann": (Scann,),
}


def steps(low: int, high: int) -> list[int]:
    """Values from low to high in factors of about 2^(1/4)."""
    count = math.ceil(4 * math.log2(high / low)) + 1
    return sorted({min(high, round(low * 2 ** (i / 4))) for i in range(count)})


def libraries() -> dict[str, Any]:
    """The installed libraries; prints how to install the missing ones."""
    results = {}
    for module, package in PACKAGES.items():
        if importlib.util.find_spec(module) is not None:
            results[module] = importlib.import_module(module)
            continue
        print(
            f"warning: measuring without {module}, which is not installed "
            f"(pip install {package})",
            file=sys.stderr,
        )
    return results
