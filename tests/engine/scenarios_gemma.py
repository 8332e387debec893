"""Gemma-3-270m: kept positions and pass keys; each function runs one engine."""

from __future__ import annotations

from typing import Any

import torch
from driver import Driver, make_llm
from score_oracles import keydiff, knorm
from texts import english_tokens

FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. "
    "Here we go. There and back again. "
)
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key. "
QUESTION = "What is the pass key? The pass key is"


def kept_and_wanted(
    model: str, policy: dict[str, Any], seed: int, lengths: list[int]
) -> dict[str, Any]:
    """Positions kept of prompts, and scores from keys and attention of transformers.

    Returns:
        Per prompt ``kept`` [layers][kv_heads][positions] and ``scores``
        [layers][kv_heads][tokens], of the full-attention layers.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = {
        n: [tokenizer.bos_token_id, *english_tokens(tokenizer, seed + n, n)[: n - 1]]
        for n in lengths
    }
    llm = make_llm(model, policy, num_gpu_blocks_override=2000)
    driver = Driver(llm)
    llm.collective_rpc("kv_policy_record", args=(True,))
    driver.generate({str(n): prompt for n, prompt in prompts.items()}, 4)
    driver.step()
    (records,) = llm.collective_rpc("kv_policy_take_records")
    report = {str(r.prompt_tokens): {"kept": r.kept_positions} for r in records}
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for n, prompt in prompts.items():
        report[str(n)]["scores"] = _scores(reference, policy, prompt).tolist()
    return report


@torch.no_grad()
def _scores(reference: Any, policy: dict[str, Any], prompt: list[int]) -> torch.Tensor:
    """float64 [full layers, kv_heads, tokens]."""
    output = reference(torch.tensor([prompt]), output_attentions=True, use_cache=True)
    layers = []
    for layer, kind in enumerate(reference.config.layer_types):
        if kind != "full_attention":
            continue
        keys = output.past_key_values.layers[layer].keys[0]
        if policy["name"] == "snapkv":
            votes = output.attentions[layer][0, :, -policy["window"] :].double()
            layers.append(_pooled(votes.mean(1).unflatten(0, (len(keys), -1)).mean(1)))
        else:
            layers.append({"knorm": knorm, "keydiff": keydiff}[policy["name"]](keys))
    return torch.stack(layers)


def _pooled(votes: torch.Tensor, width: int = 5) -> torch.Tensor:
    """Mean over the neighbours, with zeros beyond the ends."""
    kernel = torch.full((1, 1, width), 1 / width, dtype=votes.dtype)
    return torch.nn.functional.conv1d(votes[:, None], kernel, padding=width // 2)[:, 0]


def pass_keys(
    model: str, policy: dict[str, Any] | None, lengths: list[int], depths: int
) -> dict[str, Any]:
    """How many keys are found, and the blocks that the policy's layers hold.

    The model completes text; a turn ends before the question.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    driver = Driver(
        make_llm(
            model,
            policy,
            skip_tokenizer_init=False,
            num_gpu_blocks_override=2000,
            max_model_len=4096,
        )
    )
    turns = policy is not None and policy["name"] in ("flowkv", "epicache")
    report: dict[str, Any] = {}
    for length in lengths:
        found, held = 0, []
        for depth in range(depths):
            key = str(10000 + 7919 * (depth + 1) * length % 90000)
            sentences = [FILLER] * (length // 25)
            place = (2 * depth + 1) * len(sentences) // (2 * depths)
            sentences.insert(place, NEEDLE.format(key=key))
            context = [
                tokenizer.bos_token_id,
                *tokenizer.encode("".join(sentences), add_special_tokens=False),
            ]
            question = tokenizer.encode(QUESTION, add_special_tokens=False)
            name = f"{length}-{depth}"
            driver.add(
                name,
                [*context, *question],
                8,
                turn_ends=[len(context)] if turns else None,
            )
            while driver.busy:
                driver.step()
                if driver.busy and len(driver.tokens[name]) > 2:
                    held.append(_held_tokens(driver))
            found += key in tokenizer.decode(driver.tokens[name])
        report[str(length)] = {"found": found, "of": depths, "held": max(held)}
    return report


def _held_tokens(driver: Driver) -> int:
    blocks = {
        block.block_id
        for held in driver.manager.req_to_blocks.values()
        for block in held
        if not block.is_null
    }
    return len(blocks) * driver.block_size
