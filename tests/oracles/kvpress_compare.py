"""Do our policies keep the same tokens as kvpress? Run by hand, in two steps.

    python tests/oracles/kvpress_compare.py record MODEL FOLDER [--text FILE]
    python tests/oracles/kvpress_compare.py compare FOLDER

``record`` needs kvpress (tested: 0.5.5 with transformers 5.2); it runs the model
once per prompt in float32 on the CPU and asks every press, inside the attention
layer's hook, what it would keep. ``compare`` needs only this package: it gives
our policies the recorded keys and queries and compares the kept positions.

A press returns keys and values without their positions. Its ``values`` argument
is therefore replaced by numbers that are the positions; none of the presses
below reads values to score.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

WINDOW = 64
# Prompt length -> average tokens kept per KV head. At these the pyramid's top
# layer still holds the window, without which kvpress keeps layers alike.
PROMPTS = {1013: 400, 4001: 1400}
PYRAMID_BETA = 4  # 400 / 4 >= WINDOW
SEED = 20261121


# -- step one: kvpress ----------------------------------------------------------


def make_presses(ratio: float) -> dict[str, Any]:
    """Every press that has a counterpart here."""
    import kvpress

    def snapkv() -> Any:
        return kvpress.SnapKVPress(ratio, window_size=WINDOW)

    return {
        "streaming-llm": kvpress.StreamingLLMPress(ratio),
        "knorm": kvpress.KnormPress(ratio),
        "keydiff": kvpress.KeyDiffPress(ratio),
        "tova": kvpress.TOVAPress(ratio),
        "snapkv": snapkv(),
        "chunkkv": kvpress.ChunkKVPress(snapkv()),
        "pyramidkv": kvpress.PyramidKVPress(
            ratio, window_size=WINDOW, beta=PYRAMID_BETA
        ),
        "adakv safeguard=0": kvpress.AdaKVPress(snapkv(), alpha_safeguard=0.0),
        "adakv safeguard=0.2": kvpress.AdaKVPress(snapkv(), alpha_safeguard=0.2),
    }


def press_keeps(
    press: Any, module: Any, hidden: torch.Tensor, keys: torch.Tensor, kwargs: Any
) -> torch.Tensor:
    """bool [num_kv_heads, num_slots] of what a press keeps in this layer."""
    places = torch.arange(keys.shape[2], dtype=keys.dtype)
    coded = places[None, None, :, None].expand(keys.shape)
    module.masked_key_indices = None
    _, kept = press.compress(module, hidden, keys, coded, None, kwargs)
    keep = torch.zeros(keys.shape[1:3], dtype=torch.bool)
    if module.masked_key_indices is not None:
        _, heads, slots = module.masked_key_indices
        module.masked_key_indices = None
        keep[:] = True
        keep[heads, slots] = False
        return keep
    return keep.scatter(1, kept[0, :, :, 0].long(), True)


@torch.no_grad()
def record_prompt(model: Any, tokens: list[int], budget: int) -> dict[str, Any]:
    """Keys, newest queries and every press's choice, layer by layer."""
    import kvpress
    from transformers.models.llama.modeling_llama import rotate_half

    # A little above the exact ratio: kvpress truncates tokens * (1 - ratio).
    presses = make_presses(1 - (budget + 0.01) / len(tokens))
    layers: list[dict[str, Any]] = []

    def hook(module: Any, _: Any, kwargs: Any, output: Any) -> None:
        keys = kwargs["past_key_values"].layers[module.layer_idx].keys
        hidden = kwargs["hidden_states"]
        cos, sin = (part[:, None, -WINDOW:] for part in kwargs["position_embeddings"])
        newest = module.q_proj(hidden[:, -WINDOW:])
        newest = newest.unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        queries = newest * cos + rotate_half(newest) * sin
        kept = {
            name: press_keeps(press, module, hidden, keys, kwargs)
            for name, press in presses.items()
        }
        layers.append(
            {
                "keys": keys[0].clone(),
                "queries": queries[0].clone(),
                "scale": module.scaling,
                "kept": kept,
            }
        )

    hooks = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        hooks.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
    try:
        model.model(torch.tensor([tokens]), use_cache=True)
    finally:
        for handle in hooks:
            handle.remove()
    version = getattr(kvpress, "__version__", "unknown")
    return {"layers": layers, "budget": budget, "kvpress": version}


def record(model_path: str, folder: Path, text_path: Path | None) -> None:
    from texts import english_tokens
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    for length, budget in PROMPTS.items():
        if text_path is None:
            tokens = english_tokens(tokenizer, SEED, length)
        else:
            tokens = tokenizer.encode(text_path.read_text())[:length]
        if len(tokens) < length:
            raise ValueError(f"{text_path} has {len(tokens)} tokens, not {length}")
        torch.save(record_prompt(model.eval(), tokens, budget), folder / f"{length}.pt")
        print(f"recorded {length} tokens, budget {budget}")


# -- step two: ours -------------------------------------------------------------


def make_policies() -> dict[str, Any]:
    """Name of a press -> (our policy, our allocator)."""
    from vllm_kvplugins.budgets import parse_allocator
    from vllm_kvplugins.config import parse_policy

    def policy(name: str, **options: Any) -> Any:
        return parse_policy({"name": name, "budget": 400, **options})

    snapkv = policy("snapkv", window=WINDOW)
    uniform = parse_allocator("uniform")

    def adaptive(safeguard: float) -> Any:
        return parse_allocator({"name": "head-adaptive", "safeguard": safeguard})

    return {
        "streaming-llm": (policy("streaming-llm"), uniform),
        "knorm": (policy("knorm"), uniform),
        "keydiff": (policy("keydiff"), uniform),
        "tova": (policy("tova"), uniform),
        "snapkv": (snapkv, uniform),
        "chunkkv": (policy("chunkkv", window=WINDOW), uniform),
        "pyramidkv": (
            policy("pyramidkv", window=WINDOW),
            parse_allocator({"name": "pyramid", "beta": PYRAMID_BETA}),
        ),
        "adakv safeguard=0": (snapkv, adaptive(0.0)),
        "adakv safeguard=0.2": (snapkv, adaptive(0.2)),
    }


def our_keeps(
    recorded: dict[str, Any], policy: Any, allocator: Any, chunked_count: int | None
) -> torch.Tensor:
    """bool [layers, num_kv_heads, num_slots], pages of one token."""
    from views import make_layer_view

    from vllm_kvplugins.selection import keep_top

    rows = []
    for index, layer in enumerate(recorded["layers"]):
        keys, queries = layer["keys"], layer["queries"]
        wanted = policy.queries_needed
        view = make_layer_view(
            layer=index,
            keys=keys,
            positions=torch.arange(keys.shape[1]).expand(keys.shape[0], -1),
            queries=queries[:, queries.shape[1] - wanted :],
            query_positions=torch.arange(keys.shape[1] - wanted, keys.shape[1]),
            scale=layer["scale"],
            load_values=_no_values,
        )
        rows.append(policy.score(view))
    scores = torch.stack(rows)
    average = chunked_count or recorded["budget"]
    available = torch.full(scores.shape[:2], scores.shape[2])
    return keep_top(scores, allocator.allocate(scores, average, 1, available))


def _no_values() -> torch.Tensor:
    raise AssertionError("values were not recorded")


def compare(folder: Path) -> None:
    print("| prompt | press | kept (kvpress) | kept (ours) | same decision | overlap |")
    print("|---|---|---|---|---|---|")
    for path in sorted(folder.glob("*.pt"), key=lambda item: int(item.stem)):
        recorded = torch.load(path)
        for name, (policy, allocator) in make_policies().items():
            theirs = torch.stack([one["kept"][name] for one in recorded["layers"]])
            per_head = theirs.sum(-1)
            # kvpress keeps whole chunks, the short last one among them or not.
            chunked = int(per_head[0, 0]) if name == "chunkkv" else None
            ours = our_keeps(recorded, policy, allocator, chunked)
            same = (ours == theirs).double().mean()
            overlap = (ours & theirs).sum() / theirs.sum()
            print(
                f"| {path.stem} | {name} | {_span(per_head)} | {_span(ours.sum(-1))} "
                f"| {same:.5f} | {overlap:.5f} |"
            )


def _span(counts: torch.Tensor) -> str:
    least, most = int(counts.min()), int(counts.max())
    return str(least) if least == most else f"{least}–{most}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    first = steps.add_parser("record", help="run kvpress; needs its environment")
    first.add_argument("model")
    first.add_argument("folder", type=Path)
    first.add_argument("--text", type=Path, help="instead of generated sentences")
    second = steps.add_parser("compare", help="run our policies on the recording")
    second.add_argument("folder", type=Path)
    asked = parser.parse_args()
    if asked.step == "record":
        record(asked.model, asked.folder, asked.text)
    else:
        compare(asked.folder)


if __name__ == "__main__":
    main()
