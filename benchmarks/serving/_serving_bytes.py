"""All bytes of a server's KV cache, and whether a comparison was at equal bytes.

Device: the pool of blocks, and what a policy holds next to it (page lists, positions,
means and zoomed tokens of spans, kept queries). Host: memory that requests reserve,
sessions in memory, and what an offloading server reserves. Files of sessions are on
disk and do not count as memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _serving_rows import STOCK, Pool, Row, label_of
from _serving_systems import element_bytes, host_bytes

from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.model_config import read_model_config
from vllm_kvplugins.model_memory import ModelMemory

# Memory that differs by less counts as equal.
EQUAL_WITHIN = 0.01


def numbers_per_token(model: str) -> int:
    """Numbers that a block of the pool holds per token; 0 if the shape is not known.

    In a hybrid model a block belongs to one group of layers at a time.

    Args:
        model: a folder or a name.
    """
    try:
        memory = ModelMemory.of(read_model_config(model, "bfloat16"), 1)
    except (KVPolicyError, OSError):
        return 0
    return memory.block_bytes // 2


def byte_figures(
    system: Mapping[str, Any], pool: Pool, figures: Mapping[str, Any], numbers: int
) -> dict[str, Any]:
    """Bytes of one run of a server that this benchmark started.

    Args:
        figures: of the run; ``server_figures``.
        numbers: per token; 0 = not known.

    Returns:
        ``pool_bytes``, ``peak_host_bytes`` with what the system reserves at start-up,
        and ``memory_bytes``, the sum of pool, device tables and host memory. Empty if
        the shape of the cache is not known.
    """
    if not numbers or "pool_blocks" not in figures:
        return {}
    token_bytes = numbers * element_bytes(system, pool)
    pool_bytes = figures["pool_blocks"] * pool.block_size * token_bytes
    host = figures["peak_host_bytes"] + host_bytes(system)
    return {
        "pool_bytes": pool_bytes,
        "peak_host_bytes": host,
        "memory_bytes": pool_bytes + figures["peak_device_table_bytes"] + host,
    }


def compared_bytes(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Bytes of each server, at the worst of its runs, against stock's.

    Args:
        rows: comparable ones.

    Returns:
        Records of ``policy``, ``pool_bytes``, ``device_table_bytes``, ``host_bytes``,
        ``session_bytes``, ``session_disk_bytes``, ``memory_bytes``, ``against`` (the
        reference), ``share`` of its memory, and ``is_equal``. Values are None if not
        known. Without stock, the first server is the reference.
    """
    labels = list(dict.fromkeys(label_of(row["policy"]) for row in rows))
    records = [
        _record(label, [r for r in rows if label_of(r["policy"]) == label])
        for label in labels
    ]
    reference = next((r for r in records if r["policy"] == STOCK), records[0])
    base = reference["memory_bytes"]
    for record in records:
        own = record["memory_bytes"]
        share = own / base if own and base else None
        record["against"], record["share"] = reference["policy"], share
        record["is_equal"] = None if share is None else abs(share - 1) <= EQUAL_WITHIN
    return records


def _record(label: str, rows: Sequence[Row]) -> dict[str, Any]:
    def worst(name: str) -> int | None:
        values = [row["figures"].get(name) for row in rows]
        return max((value for value in values if value is not None), default=None)

    return {
        "policy": label,
        "pool_bytes": worst("pool_bytes"),
        "device_table_bytes": worst("peak_device_table_bytes"),
        "host_bytes": worst("peak_host_bytes"),
        "session_bytes": worst("peak_session_bytes"),
        "session_disk_bytes": worst("peak_session_disk_bytes"),
        "memory_bytes": worst("memory_bytes"),
    }


def verdict(record: Mapping[str, Any]) -> str:
    """``equal``, or by how much the memory differs; says if it is not known."""
    if record["share"] is None:
        return "bytes not known"
    share = f"{100 * record['share']:.1f} % of {record['against']}'s"
    return f"equal ({share})" if record["is_equal"] else f"UNEQUAL ({share})"
