"""An fp8 KV cache, with scales unless they are 1."""

from __future__ import annotations

from typing import Any

import fp8_kernels
import scenarios_speculation
from driver import Driver, make_llm
from texts import english_tokens, random_tokens
from tiny_model import VOCABULARY

_QUESTION = 20  # tokens of the last turn


# Scales of keys and values, per layer.
Scales = list[list[float]]
PLAIN: Scales = [[1.0, 1.0]]


def _set_scales(scales: Scales) -> None:
    """Give layers scales of keys and values, as a checkpoint would.

    Args:
        scales: of layer ``i`` the pair ``i`` modulo their number; of layer ``i`` of a
            draft model ``i + 2``. Heads of a drafter have the numbers behind the
            model's.
    """
    from vllm.model_executor.layers.attention import attention
    from vllm.model_executor.models.utils import extract_layer_index

    original = attention.set_default_quant_scales

    def with_scales(layer: Any, *args: Any, **kwargs: Any) -> None:
        original(layer, *args, **kwargs)
        number = extract_layer_index(layer.layer_name)
        number += 2 * layer.layer_name.startswith("draft_model")
        pair = scales[number % len(scales)]
        for name, scale in zip("kv", pair, strict=True):
            getattr(layer, f"_{name}_scale").fill_(scale)
            setattr(layer, f"_{name}_scale_float", scale)

    attention.set_default_quant_scales = with_scales


def speculating(
    scenario: str, scales: Scales, emulate: bool = True, **arguments: Any
) -> Any:
    """A scenario of ``scenarios_speculation``.

    Args:
        scenario: its name.
        scales: of the layers of an fp8 cache.
        emulate: see :func:`traffic`. No bit of a token then depends on how many others
            its step has.
        arguments: of the scenario.
    """
    if emulate:
        fp8_kernels.install()
        fp8_kernels.compute_tokens_alone()
    _set_scales(scales)
    return getattr(scenarios_speculation, scenario)(**arguments)


def traffic(
    model: str,
    policy: dict[str, Any] | None,
    cache: str,
    lengths: list[int],
    scales: Scales = PLAIN,
    emulate: bool = False,
) -> dict[str, Any]:
    """Tokens of prompts together, alone, and behind the prefix of an earlier one.

    Args:
        emulate: run vLLM's kernels of an fp8 cache in torch.
    """
    if emulate:
        fp8_kernels.install()
    _set_scales(scales)
    llm = make_llm(
        model,
        policy,
        kv_cache_dtype=cache,
        max_model_len=4096,
        skip_tokenizer_init=False,
    )
    driver = Driver(llm)
    turns = getattr(driver.manager.kv_cache_spec, "policy", None)
    turns = turns.turns if turns else None
    patched = random_tokens(9, 40, VOCABULARY) if turns and turns.history_only else None

    def run(kind: str, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
        for name, prompt in prompts.items():
            ends = [len(prompt) - _QUESTION] if turns else None
            driver.add(f"{kind}-{name}", prompt, 40, turn_ends=ends, patched=patched)
        driver.run()
        return {name: driver.tokens[f"{kind}-{name}"] for name in prompts}

    prompts = {str(n): random_tokens(n, n, VOCABULARY) for n in lengths}
    together = run("together", prompts)
    hits = run("hits", prompts)
    cached = [driver.cached[f"hits-{name}"] for name in prompts]
    alone: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        driver.llm.reset_prefix_cache()
        alone |= run("alone", {name: prompt})
    driver.step()
    driver.check_blocks()
    return {
        "together": together,
        "hits": hits,
        "alone": alone,
        "cached": cached,
        "held": len(driver.held_blocks()),
        "compactions": getattr(driver.manager, "compactions", 0),
        "host_bytes": _used_host_bytes(driver, prompts),
        "kernel": _kernel(driver),
    }


def _kernel(driver: Driver) -> str:
    """Class of the attention layers."""
    layers = driver.worker.vllm_config.compilation_config.static_forward_context
    return type(next(iter(layers.values())).impl).__name__


def _used_host_bytes(driver: Driver, prompts: dict[str, list[int]]) -> int:
    """Bytes that one of the prompts has in the host tier while it is answered."""
    extensions = getattr(getattr(driver, "runtime", None), "extensions", [])
    tiers = [each.tier for each in extensions if hasattr(each, "tier")]
    if not tiers:
        return 0
    (tier,) = tiers
    most = 0
    driver.add("counted", max(prompts.values(), key=len), 8)
    while driver.busy:
        driver.step()
        most = max(most, (len(tier.pages) - tier.num_free) * tier.page_bytes)
    driver.step()
    return most


def kept(
    model: str, policy: dict[str, Any], cache: str, tokens: int, seed: int, dtype: str
) -> list[Any]:
    """Positions that a policy keeps of an English text, by layer and KV head."""
    from transformers import AutoTokenizer

    prompt = english_tokens(AutoTokenizer.from_pretrained(model), seed, tokens)
    llm = make_llm(model, policy, kv_cache_dtype=cache, max_model_len=2048, dtype=dtype)
    driver = Driver(llm)
    llm.collective_rpc("kv_policy_record", args=(True,))
    driver.generate({"text": prompt[:tokens]}, 4)
    driver.step()
    (records,) = llm.collective_rpc("kv_policy_take_records")
    positions: list[Any] = records[0].kept_positions
    return positions
