"""A request with NaN values next to a healthy one."""

from __future__ import annotations

import gc
from typing import Any

from driver import make_llm, worker_of


def beside(
    model: str,
    policies: dict[str, dict[str, Any]],
    well: list[int],
    sick: list[int],
    history: int,
    max_tokens: int,
) -> dict[str, dict[str, Any]]:
    """The healthy request alone, next to the sick one, and after it.

    Args:
        history: tokens of either prompt that policies which ask for turns may take.

    Returns:
        Per policy the tokens ``alone``, ``beside`` and ``after``, those of the ``sick``
        one, and how many compactions had scores that were NaN; or ``error``.
    """
    report: dict[str, dict[str, Any]] = {}
    for name, policy in policies.items():
        try:
            report[name] = _beside(model, policy, well, sick, history, max_tokens)
        except Exception as error:
            report[name] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()  # an engine without references ends here
    return report


def _beside(
    model: str,
    policy: dict[str, Any],
    well: list[int],
    sick: list[int],
    history: int,
    max_tokens: int,
) -> dict[str, Any]:
    from vllm import SamplingParams

    llm = make_llm(
        model,
        policy,
        # the other request takes the sick one's blocks
        num_gpu_blocks_override=40,
        max_model_len=800,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
        skip_tokenizer_init=False,  # for policies that encode text
    )

    def run(*prompts: list[int]) -> list[list[int]]:
        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"turn_ends": [history]},
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    (alone,) = run(well)
    ill, beside_it = run(sick, well)
    unscored = worker_of(llm).kv_policy.runtime.unscored_compactions
    (after,) = run(well)
    return {
        "alone": alone,
        "beside": beside_it,
        "after": after,
        "sick": ill,
        "unscored": unscored,
    }
