"""Probing policies on the real model, and reference attention from transformers."""

from __future__ import annotations

from typing import Any

import torch
from driver import Driver, make_llm
from texts import english_tokens, random_tokens


def random_prompt(vocabulary: int, seed: int, count: int) -> list[int]:
    return random_tokens(seed, count, vocabulary)


def kept_and_wanted(
    model: str,
    policy: dict[str, Any],
    seed: int,
    lengths: list[int],
    vocabulary: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """Positions kept of prompts that run together, and the reference's scores.

    Args:
        vocabulary: number of tokens from which prompts are drawn; 0: English.

    Returns:
        Per prompt ``kept`` [layers][kv_heads][positions] and ``scores``
        [layers][kv_heads][tokens], of the layers that the policy manages.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    make = random_prompt if vocabulary else english_tokens
    prompts = {n: make(vocabulary or tokenizer, seed + n, n) for n in lengths}
    llm = make_llm(model, policy, skip_tokenizer_init=False, **settings)
    driver = Driver(llm)
    llm.collective_rpc("kv_policy_record", args=(True,))
    driver.generate({str(n): prompt for n, prompt in prompts.items()}, 4)
    driver.step()
    driver.check_blocks()
    assert driver.check_policy_state() == 0, "state was left behind"
    (records,) = llm.collective_rpc("kv_policy_take_records")
    report = {str(r.prompt_tokens): {"kept": r.kept_positions} for r in records}
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for n, prompt in prompts.items():
        scores = _scores(reference, tokenizer, policy, prompt)
        report[str(n)]["scores"] = scores.tolist()
    return report


@torch.no_grad()
def _scores(
    reference: Any, tokenizer: Any, policy: dict[str, Any], prompt: list[int]
) -> torch.Tensor:
    """Scores [layers, kv_heads, prompt tokens] from whole attention matrices."""
    config = reference.config
    group = config.num_attention_heads // config.num_key_value_heads
    kinds = getattr(config, "layer_types", None) or []
    best = None
    for lead, start, stop in _probes(tokenizer, policy, prompt):
        repeated = prompt[start:stop] if policy["name"] == "kvzip" else []
        sequence = torch.tensor([prompt + lead + repeated])
        attentions = reference(sequence, output_attentions=True).attentions
        visible = torch.zeros(sequence.shape[1], dtype=torch.bool)
        visible[start:stop] = True
        visible[len(prompt) :] = True
        visible[: policy.get("sinks", 4)] = True
        layers = []
        for layer, weights in enumerate(attentions):
            if kinds and kinds[layer] != "full_attention":
                continue
            rows = weights[0, :, len(prompt) :]
            rows = torch.where(visible, rows, 0)  # the softmax covers fewer slots
            rows = rows / rows.sum(-1, keepdim=True)
            peak = rows.amax(1)[:, : len(prompt)]
            layers.append(peak.unflatten(0, (-1, group)).amax(1))
        scores = torch.stack(layers)
        best = scores if best is None else torch.maximum(best, scores)
    assert best is not None
    return best


def _probes(
    tokenizer: Any, policy: dict[str, Any], prompt: list[int]
) -> list[tuple[list[int], int, int]]:
    """(instruction, first position, end) of each probe, written out by hand."""
    if policy["name"] == "infinipot":
        text = "Summarize the previous context highlighting the most important parts."
        return [(tokenizer.encode(text, add_special_tokens=False), 0, len(prompt))]
    whole = tokenizer.encode(
        "\n\nRepeat the previous context exactly.", add_special_tokens=False
    )
    part = tokenizer.encode(
        "\n\nRepeat the part of the previous context exactly, starting with",
        add_special_tokens=False,
    )
    newline = tokenizer.encode("\n", add_special_tokens=False)
    probes = [(whole + newline, 0, min(policy["chunk"], len(prompt)))]
    while probes[-1][2] < len(prompt):
        start = probes[-1][2]
        lead = part + prompt[start - 8 : start] + newline
        probes.append((lead, start, min(start + policy["chunk"], len(prompt))))
    return probes
