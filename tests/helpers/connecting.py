"""Runs ``scenarios_kv_connectors`` and checks what holds in all of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from harness import run_scenario

SNAPKV = {"name": "snapkv", "budget": 96}  # its window is 64 tokens
FLOWKV = {"name": "flowkv", "ratio": 0.5, "sessions": False}
# An fp8 cache with vLLM's own kernels, which need AVX-512.
VLLMS_FP8 = {"cache": "fp8", "emulate": False}
POLICIES: dict[str, dict[str, Any]] = {
    "snapkv": SNAPKV,
    "flowkv": FLOWKV,
    "icecache": {"name": "icecache", "budget": 128, "skip_layers": 1},
    "streaming-llm": {"name": "streaming-llm", "budget": 96},
    "full": {"name": "full"},
    "prefill-blocks": SNAPKV | {"prefill_block": 192},
    "decode-budget": SNAPKV | {"decode_budget": 160},
    "no-queries": {"name": "knorm", "budget": 96},
    # They run tokens of their own through the model before they compact.
    "kvzip": {"name": "kvzip", "budget": 96, "chunk": 200},
    "infinipot": {"name": "infinipot", "budget": 96},
    "epicache": {
        "name": "epicache",
        "budget": 96,
        "prefill_block": 128,
        "longest_patched_prompt": 64,
    }
    | {"sessions": False},
}


def call(
    scenario: str, environment: dict[str, str | None] | None = None, **arguments: Any
) -> Any:
    name = f"scenarios_kv_connectors:{scenario}"
    return run_scenario(name, arguments, environment, timeout=580)


def exact_blocks(model: str, folder: Path, **arguments: Any) -> str:
    """File with the blocks that vLLM stores without a policy."""
    path = str(folder / "store.pt")
    call("exact", model=model, path=path, **arguments)
    return path


@functools.cache
def recomputed(model: str, name: str, **settings: Any) -> Any:
    """Tokens of a policy without another connector."""
    return call("recomputed", model=model, policy=POLICIES[name], **settings)


def stored(
    model: str,
    name: str,
    exact: str,
    cache: str = "auto",
    emulate: bool = True,
    **arguments: Any,
) -> dict[str, Any]:
    """Two rounds of prompts next to a store, which sees exact blocks only. Both give
    the tokens of an engine without it, and nothing stays behind.
    """
    engine = {"cache": cache, "emulate": emulate}
    result: dict[str, Any] = call(
        "stored", model=model, policy=POLICIES[name], path=exact, **engine, **arguments
    )
    assert result["wrong"] == [], "blocks that differ from those without a policy"
    assert result["first"] == result["again"] == recomputed(model, name, **engine)
    assert result["tracked"] == 0
    assert result["layer_saves"] > 0
    assert result["late"] == 0, "shown a forward pass that is no step"
    return result
