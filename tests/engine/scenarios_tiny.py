"""Scenarios on the tiny random model; each function runs one engine."""

from __future__ import annotations

from typing import Any

from driver import Driver, make_llm
from texts import random_tokens
from tiny_model import VOCABULARY

Policy = dict[str, Any] | None


def _prompt(seed: int, count: int) -> list[int]:
    return random_tokens(seed, count, VOCABULARY)


def _driver(model: str, policy: Policy) -> Driver:
    llm = make_llm(model, policy, num_gpu_blocks_override=400, disable_log_stats=False)
    return Driver(llm)


def _left_behind(driver: Driver) -> dict[str, int]:
    driver.step()  # a step so that the worker learns of the ended requests
    driver.check_blocks()
    return {
        "tracked": driver.check_policy_state(),
        "held": len(driver.held_blocks()),
        "free": driver.free_blocks,
        "total": driver.total_blocks,
    }


# -- reclaim and metrics --------------------------------------------------------


def observe_reclaim(model: str, policy: Policy) -> dict[str, Any]:
    """One prompt of 2900 tokens: pool and metrics after every step."""
    driver = _driver(model, policy)
    before = driver.free_blocks
    driver.add("long", _prompt(1, 2900), max_tokens=70)
    driver.step_until(lambda: driver.decoding() == 1)
    at_prefill_end = driver.free_blocks
    steps = []
    pages: list[int] = []
    while driver.busy:
        driver.step()
        driver.check_blocks()
        if driver.busy:
            (request,) = driver.scheduler.running
            pages = _seated_pages(driver.runtime)
            steps.append(
                {
                    "computed": request.num_computed_tokens,
                    "held": before - driver.free_blocks,
                    "metrics": _policy_metrics(driver.llm),
                }
            )
    return {
        "free_before": before,
        "free_at_prefill_end": at_prefill_end,
        "steps": steps,
        "free_after": driver.free_blocks,
        "metrics_after": _policy_metrics(driver.llm),
        "seated_pages": pages,
    }


def reports(model: str, policy: Policy) -> list[dict[str, Any]]:
    """Two turns that ask for a report and one that does not.

    Next to each report: the blocks that the pool had handed out before the last step,
    and the growth of the metrics.
    """
    from vllm import SamplingParams

    driver = _driver(model, policy)
    free, before = driver.free_blocks, _policy_metrics(driver.llm)
    prompt = _prompt(5, 700)
    found = []
    for turn, asks in enumerate((True, True, False)):
        params = SamplingParams(
            temperature=0,
            max_tokens=40,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_report": asks},
        )
        driver.engine.add_request(str(turn), {"prompt_token_ids": prompt}, params)
        while driver.busy:
            held = free - driver.free_blocks
            (last,) = driver.engine.step() or [None]
        after = _policy_metrics(driver.llm)
        found.append(
            {
                "returned": last.kv_transfer_params,
                "prompt_tokens": len(prompt),
                "held": held,
                "growth": {name: after[name] - before[name] for name in after},
            }
        )
        before = after
        prompt = [*prompt, *last.outputs[0].token_ids, *_prompt(6 + turn, 50)]
    return found


def _policy_metrics(llm: Any) -> dict[str, float]:
    report = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:kv_policy_")
        if name != metric.name:
            report[name] = getattr(metric, "value", None)
            if report[name] is None:
                report[name] = metric.count
    return report


def _seated_pages(state: Any) -> list[int]:
    """Retained pages per (layer, KV head) of the only request, which is compacted."""
    (tracked,) = state._requests.values()
    held = (tracked.resident.positions >= 0).sum(1)
    return (held // state.geometry.block_size).tolist()


# -- prefix caching ---------------------------------------------------------------


def observe_prefix(model: str, policy: Policy) -> dict[str, Any]:
    """Prompts with shared prefixes, each with an empty cache and after the others."""
    driver = _driver(model, policy)
    first = _prompt(11, 1000)
    prompts = {
        "first": first,
        "same": first,
        "longer": first[:700] + _prompt(12, 500),
        "shorter": first[:700] + _prompt(13, 60),
        "short": first[:110],
    }
    fresh = {}
    for name, prompt in prompts.items():
        driver.llm.reset_prefix_cache()
        key = f"fresh-{name}"
        driver.generate({key: prompt}, 24)
        assert driver.cached[key] == 0
        fresh[name] = driver.tokens[key]
    driver.llm.reset_prefix_cache()

    # "first" fills the cache; record its blocks while it still holds them.
    driver.add("first", first, 24)
    driver.step_until(lambda: driver.decoding() == 1)
    (blocks,) = driver.manager.req_to_blocks.values()
    ids = [block.block_id for block in blocks if block.block_hash is not None]
    before = _pages_of(driver.runtime.heap, ids)
    driver.run()
    after_first = _pages_of(driver.runtime.heap, ids)
    for name in ("same", "longer", "shorter", "short"):
        driver.generate({name: prompts[name]}, 24)
    # all at once, so that they share blocks while they run
    together = {f"together-{name}": prompt for name, prompt in prompts.items()}
    driver.generate(together, 24)
    after_all = _pages_of(driver.runtime.heap, ids)

    # the next turn of a conversation that was never compacted
    turn = [*prompts["short"], *driver.tokens["short"], *_prompt(14, 30)]
    driver.generate({"next-turn": turn}, 4)
    return {
        "lengths": {name: len(prompt) for name, prompt in prompts.items()},
        "fresh": fresh,
        "tokens": {name: driver.tokens[name] for name in prompts},
        "together": {name: driver.tokens[f"together-{name}"] for name in prompts},
        "cached": {name: driver.cached[name] for name in prompts},
        "cached_together": {n: driver.cached[f"together-{n}"] for n in prompts},
        "cached_next_turn": driver.cached["next-turn"],
        "hashed_blocks": len(ids),
        "unchanged": before == after_first == after_all,
        "left_behind": _left_behind(driver),
    }


def _pages_of(heap: Any, block_ids: list[int]) -> str:
    """Fingerprint of the contents of these blocks in all layers and KV heads."""
    import hashlib

    import torch

    pages = heap.pages[heap.page_ids(torch.tensor(block_ids)).reshape(-1)]
    return hashlib.sha256(pages.numpy().tobytes()).hexdigest()


# -- capacity ------------------------------------------------------------------------


def capacity(
    model: str, policy: Policy, blocks: int, conversations: int, prompt_tokens: int
) -> dict[str, Any]:
    """How many conversations decode at the same time in a pool of ``blocks`` blocks."""
    llm = make_llm(
        model,
        policy,
        num_gpu_blocks_override=blocks,
        max_num_seqs=conversations,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
    )
    driver = Driver(llm)
    for number in range(conversations):
        prompt = _prompt(100 + number, prompt_tokens)
        # Long enough that the first one still decodes when the last one arrives.
        driver.add(str(number), prompt, max_tokens=3 * conversations)
    most_decoding = 0
    while driver.busy:
        driver.step()
        most_decoding = max(most_decoding, driver.decoding())
    return {
        "most_decoding": most_decoding,
        "preemptions": driver.preemptions,
        "finished": len(driver.finished),
    }


# -- answers -------------------------------------------------------------------------


def answers(
    model: str,
    policy: Policy,
    lengths: list[int],
    max_tokens: int,
    **settings: Any,
) -> dict[str, Any]:
    """Greedy tokens of random prompts that run together."""
    driver = Driver(make_llm(model, policy, num_gpu_blocks_override=400, **settings))
    for length in lengths:
        driver.add(str(length), _prompt(length, length), max_tokens)
    steps = 0
    while driver.busy:
        driver.step()
        driver.check_blocks()
        steps += 1
    return {
        "tokens": driver.tokens,
        "compactions": getattr(driver.manager, "compactions", 0),
        "steps": steps,
    }


# -- what was kept ---------------------------------------------------------------------


def recorded(
    model: str, policy: Policy, lengths: list[int], max_tokens: int, **settings: Any
) -> dict[str, Any]:
    """Tokens of prompts that run together, and the positions that each compaction
    kept.
    """
    driver = Driver(make_llm(model, policy, num_gpu_blocks_override=400, **settings))
    driver.llm.collective_rpc("kv_policy_record", args=(True,))
    prompts = {str(n): _prompt(n, n) for n in lengths}
    driver.generate(prompts, max_tokens)
    (records,) = driver.llm.collective_rpc("kv_policy_take_records")
    runs: dict[str, Any] = {
        name: {"prompt": prompt, "tokens": driver.tokens[name], "compactions": []}
        for name, prompt in prompts.items()
    }
    for record in records:  # compactions of one request, in their order
        done = runs[str(record.prompt_tokens)]["compactions"]
        plan = driver.runtime.plan(record.prompt_tokens)
        at_tokens = plan.compaction(len(done)).at_tokens
        done.append({"at_tokens": at_tokens, "kept": record.kept_positions})
    return runs


# -- what policies read from the model ------------------------------------------


def output_weights(model: str, policy: Policy) -> dict[str, Any]:
    """The output projections that the policy got, next to those of the checkpoint."""
    from safetensors.torch import load_file

    driver = _driver(model, policy)
    driver.add("one", _prompt(1, 300), max_tokens=3)
    driver.run()
    stored = load_file(f"{model}/model.safetensors")
    views = driver.runtime._compactor.views
    errors = []
    for layer, read in enumerate(views.output_weights):
        weights = read()
        wanted = stored[f"model.layers.{layer}.self_attn.o_proj.weight"].T
        errors.append(float((weights.flatten(0, 1) - wanted).abs().max()))
    return {
        "errors": errors,
        "largest": float(wanted.abs().max()),
        "heads": list(weights.shape),
        "layers": views.heap.num_layers,
    }
