"""One architecture under stock vLLM and under policies, in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from driver import Driver, make_llm
from texts import random_tokens
from tiny_model import VOCABULARY

Policy = dict[str, Any] | None

MAX_TOKENS = 12  # crosses the end of a block
CHUNK = 128  # tokens per step, so that prompts take several
PROMPT, SHARED = 310, 200
TOGETHER = (40, 180, 257)

DEFAULTS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_batched_tokens": CHUNK,
    "num_gpu_blocks_override": 64,
    "skip_tokenizer_init": False,  # for policies that encode text
}


def runs(model: str, policies: dict[str, Policy], **settings: Any) -> dict[str, Any]:
    """What each policy did, or the error that refused it; None is stock vLLM."""
    return each(policies, lambda policy: _run(model, policy, settings))


def each(
    policies: dict[str, Policy], run: Callable[[Policy], dict[str, Any]]
) -> dict[str, Any]:
    report = {}
    for name, policy in policies.items():
        try:
            report[name] = run(policy)
        except Exception as error:
            report[name] = {"error": [type(error).__name__, str(error)]}
        gc.collect()  # an engine without references ends here
    return report


def _run(model: str, policy: Policy, settings: dict[str, Any]) -> dict[str, Any]:
    driver = Driver(make_llm(model, policy, **(DEFAULTS | settings)))
    first = random_tokens(1, PROMPT, VOCABULARY)
    second = first[:SHARED] + random_tokens(2, PROMPT - SHARED, VOCABULARY)
    driver.add("chunks", first, MAX_TOKENS)
    held = run_and_watch(driver)
    for name, prompt in {"prefix": second, "same": first}.items():
        driver.generate({name: prompt}, MAX_TOKENS)
    together = {str(n): random_tokens(10 + n, n, VOCABULARY) for n in TOGETHER}
    together["preempted"] = first
    for name, prompt in together.items():
        driver.add(name, prompt, MAX_TOKENS)
    driver.step_until(lambda: driver.decoding() == len(together))
    driver.llm.reset_prefix_cache(reset_running_requests=True)  # preempts all
    driver.run()
    return {
        "tokens": driver.tokens,
        "cached": driver.cached,
        "preemptions": driver.preemptions,
        "held": held,
        **left_behind(driver, policy),
    }


def run_and_watch(driver: Driver) -> list[tuple[int, int]]:
    """Run the only request; after each decode step, the blocks that it holds, and
    those that its plan says.

    Leaves out steps that end with a compaction: the next one frees its blocks.
    """
    held = []
    while driver.busy:
        driver.step()
        for request in driver.scheduler.running:
            computed = request.num_computed_tokens
            if computed <= request.num_prompt_tokens:
                continue
            blocks = -(-computed // driver.block_size)
            if hasattr(driver.manager, "plans"):
                plan = driver.manager.plans.of(request)
                if plan.num_done(computed) > plan.num_done(computed - 1):
                    continue
                blocks = plan.resident_blocks(computed)
            held.append((len(driver.held_blocks()), blocks))
    return held


def left_behind(driver: Driver, policy: Policy) -> dict[str, int]:
    """What is left when all requests have ended, and what the policy did."""
    driver.step()  # the worker learns of the ended requests
    driver.check_blocks()
    report = {"left": driver.total_blocks - driver.free_blocks}
    if policy is not None:
        report |= {
            "compactions": driver.manager.compactions,
            "tracked": driver.check_policy_state(),
            "unscored": driver.runtime.unscored_compactions,
        }
    return report


# -- kinds of requests -----------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["mm", "inch"]},
        "name": {"type": "string", "pattern": "^[a-z]{3,6}$"},
    },
    "required": ["unit", "name"],
    "additionalProperties": False,
}
REGEX = "[0-9]{4}-[a-z]{3}"


def requests(model: str, policies: dict[str, Policy]) -> dict[str, Any]:
    """Parallel samples; then logprobs and structured output at once; all again."""
    return each(policies, lambda policy: _requests(model, policy))


def _requests(model: str, policy: Policy) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    # A seeded prompt in several chunks ends the engine of stock vLLM on a CPU.
    arguments = {
        "max_num_batched_tokens": CHUNK if policy else 1024,
        "structured_outputs_config": {
            "backend": "xgrammar",
            "disable_any_whitespace": True,  # which a random model likes
        },
    }
    llm = make_llm(model, policy, **(DEFAULTS | arguments))
    driver = Driver(llm)
    free = {"max_tokens": 8, "ignore_eos": True}
    greedy = {"temperature": 0.0, **free}
    constrained = {"temperature": 0.0, "max_tokens": 48}
    kinds = {
        "logprobs": SamplingParams(logprobs=3, **greedy),
        "prompt_logprobs": SamplingParams(logprobs=1, prompt_logprobs=2, **greedy),
        "samples": SamplingParams(n=3, temperature=1.0, seed=5, **free),
        "regex": SamplingParams(
            structured_outputs=StructuredOutputsParams(regex=REGEX), **constrained
        ),
        "json": SamplingParams(
            structured_outputs=StructuredOutputsParams(json=SCHEMA), **constrained
        ),
    }
    prompt = {"prompt_token_ids": random_tokens(3, PROMPT, VOCABULARY)}
    samples = {"samples": kinds.pop("samples")}
    runs = [
        llm.generate([prompt] * len(some), list(some.values()), use_tqdm=False)
        for some in (samples, kinds, samples, kinds)
    ]
    runs = [runs[0] + runs[1], runs[2] + runs[3]]
    kinds = samples | kinds
    report: dict[str, Any] = {
        f"{name}-{number}": _plain(output)
        for number, outputs in enumerate(runs)
        for name, output in zip(kinds, outputs, strict=True)
    }
    return report | left_behind(driver, policy)


def _plain(output: Any) -> dict[str, Any]:
    """A request's output as JSON can hold it."""
    return {
        "tokens": [list(one.token_ids) for one in output.outputs],
        "texts": [one.text for one in output.outputs],
        "logprobs": [
            [_numbers(entry) for entry in one.logprobs or ()] for one in output.outputs
        ],
        "prompt_logprobs": [
            _numbers(entry) for entry in (output.prompt_logprobs or ()) if entry
        ],
    }


def _numbers(entry: Any) -> dict[str, float]:
    return {str(token): item.logprob for token, item in entry.items()}


# -- LoRA ------------------------------------------------------------------------


def adapters(
    model: str, folders: dict[str, str], policies: dict[str, Policy]
) -> dict[str, Any]:
    """Two adapters and the base model at once, one after the other, and in turns."""
    return each(policies, lambda policy: _adapters(model, folders, policy))


def _adapters(model: str, folders: dict[str, str], policy: Policy) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    arguments = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    driver = Driver(make_llm(model, policy, **DEFAULTS, **arguments))
    loras = {"base": None} | {
        name: LoRARequest(name, number, path)
        for number, (name, path) in enumerate(folders.items(), 1)
    }
    prompt = random_tokens(1, PROMPT, VOCABULARY)
    for name, lora in loras.items():
        driver.add(f"{name}-together", prompt, MAX_TOKENS, lora=lora)
    driver.run()
    driver.llm.reset_prefix_cache()
    for turn in ("first", "again"):
        for name, lora in loras.items():
            driver.add(f"{name}-{turn}", prompt, MAX_TOKENS, lora=lora)
            driver.run()
    hits = []
    sessions = driver.scheduler.connector.sessions if policy else None
    if sessions is not None:
        directory = sessions.directory
        directory.clear()
        driver.add("talk", prompt, MAX_TOKENS, lora=loras["a"])
        driver.run()
        history = [*prompt, *driver.tokens["talk"], *random_tokens(2, 40, VOCABULARY)]
        for name in ("b", "base", "a"):
            driver.step()  # the worker reports what it saved
            before = directory.counts.hits
            driver.add(f"{name}-continues", history, 4, lora=loras[name])
            driver.run()
            hits.append(directory.counts.hits - before)
    return {
        "tokens": driver.tokens,
        "cached": driver.cached,
        "hits": hits,
        **left_behind(driver, policy),
    }


def plain(model: str, policies: dict[str, Policy]) -> dict[str, Any]:
    """The prompt of ``adapters`` on a model without LoRA."""

    def run(policy: Policy) -> dict[str, Any]:
        driver = Driver(make_llm(model, policy, **DEFAULTS))
        prompt = random_tokens(1, PROMPT, VOCABULARY)
        return driver.generate({"tokens": prompt}, MAX_TOKENS)

    return each(policies, run)
