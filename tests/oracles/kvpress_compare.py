"""Compares the tokens that our policies keep with kvpress. A manual check in two steps.

    python tests/oracles/kvpress_compare.py record MODEL FOLDER [--text FILE]
    python tests/oracles/kvpress_compare.py compare FOLDER

``record`` needs kvpress (tested: 0.5.5 with transformers 5.2). It runs the model once
per prompt in float32 on the CPU and records, inside the attention layer's hook, what
every press would keep. ``compare`` needs only this package: it gives our policies the
recorded keys and queries and compares the kept positions.

A press returns keys and values without their positions. So its ``values`` argument is
replaced by the positions. For a press that reads values or attention, its ``score`` is
called instead, and the best tokens are selected as in ``ScorerPress.compress``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
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


# Tokens whose attention is summed at a time.
QUERIES_AT_ONCE = 256
FUTURE = 512
SEEN = "observed attention"  # reads the sums; others would take them for weights
BY_SCORE = ("criticalkv", "lagkv", "expected-attention", SEEN)


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
        "lagkv": kvpress.LagKVPress(ratio),
        "criticalkv": kvpress.CriticalKVPress(snapkv()),
        "expected-attention": kvpress.ExpectedAttentionPress(
            ratio, n_future_positions=FUTURE
        ),
        SEEN: kvpress.ObservedAttentionPress(ratio),
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


def scores_keep(
    press: Any,
    module: Any,
    hidden: torch.Tensor,
    cache: Any,
    attentions: Any,
    kwargs: Any,
) -> torch.Tensor:
    """As ``press_keeps``, for presses that score by values or attention."""
    from kvpress.utils import compute_n_kept

    states = hidden, cache.keys, cache.values
    scores = press.score(module, *states, attentions, kwargs)[0]
    count = compute_n_kept(scores.shape[1], press.compression_ratio)
    best = scores.topk(count, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)


def attention_sums(
    queries: torch.Tensor, keys: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention that each key receives: [num_q_heads, num_slots]."""
    slots = keys.shape[1]
    keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0)
    total = torch.zeros(keys.shape[:2])
    for first in range(0, slots, QUERIES_AT_ONCE):
        logits = queries[:, first : first + QUERIES_AT_ONCE] @ keys.mT * scale
        at = torch.arange(first, first + logits.shape[1])[:, None]
        later = torch.arange(slots) > at
        total += logits.masked_fill(later, -torch.inf).softmax(-1).sum(1)
    return total


@torch.no_grad()
def record_prompt(model: Any, tokens: list[int], budget: int) -> dict[str, Any]:
    """Keys, newest queries and every press's choice, layer by layer."""
    import kvpress
    from transformers.models.llama.modeling_llama import rotate_half

    # Models with several RoPE bases want the kind of layer.
    takes_kind = "layer_type" in signature(model.model.rotary_emb.forward).parameters
    # A little above the exact ratio: kvpress truncates tokens * (1 - ratio).
    presses = make_presses(1 - (budget + 0.01) / len(tokens))
    if takes_kind:
        del presses["expected-attention"]  # it does not name the kind
    layers: list[dict[str, Any]] = []

    def hook(module: Any, _: Any, kwargs: Any, output: Any) -> None:
        if getattr(module, "is_sliding", False):
            return  # a policy leaves this layer to vLLM
        cache = kwargs["past_key_values"].layers[module.layer_idx]
        hidden = kwargs["hidden_states"]
        cos, sin = (part[:, None] for part in kwargs["position_embeddings"])
        raw = module.q_proj(hidden).unflatten(-1, (-1, module.head_dim))
        raw = getattr(module, "q_norm", lambda x: x)(raw).transpose(1, 2)
        queries = (raw * cos + rotate_half(raw) * sin)[0]
        # the press sums over the queries, which are all in one row here
        sums = attention_sums(queries, cache.keys[0], module.scaling)[None, :, None]
        kept = {
            name: scores_keep(
                press, module, hidden, cache, sums if name == SEEN else None, kwargs
            )
            if name in BY_SCORE
            else press_keeps(press, module, hidden, cache.keys, kwargs)
            for name, press in presses.items()
        }
        layers.append(
            {
                "keys": cache.keys[0].clone(),
                "values": cache.values[0].clone(),
                "queries": queries.clone(),
                "scale": module.scaling,
                "output": module.o_proj.weight.T.clone(),
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
    positions = torch.arange(len(tokens) + FUTURE)[None]
    kind = ["full_attention"] if takes_kind else []
    rotary = model.model.rotary_emb(torch.zeros(1), positions, *kind)
    half = rotary[0].shape[-1] // 2
    return {
        "layers": layers,
        "budget": budget,
        "kvpress": version,
        "rotary": [part[0, :, :half] for part in rotary],
    }


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


@dataclass(frozen=True)
class Comparison:
    """One line of the table: a press, and what it is compared with.

    Attributes:
        adapt: changes our scores first, to show that nothing else differs.
    """

    name: str
    press: str
    policy: Any
    allocator: Any
    adapt: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores


def make_comparisons() -> list[Comparison]:
    """All presses of ``make_presses``, some of them twice."""
    from vllm_kvplugins.budgets import parse_allocator
    from vllm_kvplugins.config import parse_policy

    def policy(name: str, **options: Any) -> Any:
        return parse_policy({"name": name, "budget": 400, **options})

    def adaptive(safeguard: float) -> Any:
        return parse_allocator({"name": "head-adaptive", "safeguard": safeguard})

    snapkv = policy("snapkv", window=WINDOW)
    uniform = parse_allocator("uniform")
    plain = {
        "streaming-llm": policy("streaming-llm"),
        "knorm": policy("knorm"),
        "keydiff": policy("keydiff"),
        "tova": policy("tova"),
        "snapkv": snapkv,
        "chunkkv": policy("chunkkv", window=WINDOW),
        "lagkv": policy("lagkv"),
        "criticalkv": policy("criticalkv", window=WINDOW),
        "expected-attention": policy("expected-attention", future=FUTURE),
    }
    pyramidkv = policy("pyramidkv", window=WINDOW)
    pyramid = parse_allocator({"name": "pyramid", "beta": PYRAMID_BETA})
    h2o = policy("h2o", recent=0)
    name = f"pyramidkv, beta {PYRAMID_BETA}"
    return [
        *(Comparison(name, name, one, uniform) for name, one in plain.items()),
        Comparison(name, "pyramidkv", pyramidkv, pyramid),
        Comparison(
            f"{name}, window inside", "pyramidkv", pyramidkv, pyramid, window_inside
        ),
        Comparison("observed attention, h2o", SEEN, h2o, uniform),
        Comparison("observed attention, h2o per query", SEEN, h2o, uniform, per_query),
        *(
            Comparison(f"adakv, safeguard {x:g}", f"adakv safeguard={x:g}", snapkv, a)
            for x, a in ((0, adaptive(0.0)), (0.2, adaptive(0.2)))
        ),
    ]


def window_inside(scores: torch.Tensor) -> torch.Tensor:
    """The window wins by its score and is not known to stay."""
    stays = scores.isposinf()
    return scores.masked_fill(stays, float(scores[~stays].max()) + 1)


def per_query(scores: torch.Tensor) -> torch.Tensor:
    """Sums divided by the number of queries that saw a slot."""
    return scores / torch.arange(scores.shape[-1], 0, -1)


def our_keeps(recorded: dict[str, Any], ours: Comparison, average: int) -> torch.Tensor:
    """bool [layers, num_kv_heads, num_slots], pages of one token."""
    from vllm_kvplugins.scoring.selection import keep_top

    layers = range(len(recorded["layers"]))
    scores = torch.stack([our_scores(recorded, i, ours.policy) for i in layers])
    scores = ours.adapt(scores)
    available = torch.full(scores.shape[:2], scores.shape[2])
    return keep_top(scores, ours.allocator.allocate(scores, average, 1, available))


def our_scores(recorded: dict[str, Any], index: int, policy: Any) -> torch.Tensor:
    """float32 [num_kv_heads, num_slots] of one layer."""
    from views import make_layer_view

    from vllm_kvplugins.scoring.rotary import Rotary

    layer = recorded["layers"][index]
    heads, slots, dim = layer["keys"].shape
    query_heads = len(layer["queries"]), dim

    def view(newest: int, observed: Any) -> Any:
        return make_layer_view(
            layer=index,
            keys=layer["keys"],
            positions=torch.arange(slots).expand(heads, -1),
            queries=layer["queries"][:, slots - newest :],
            query_positions=torch.arange(slots - newest, slots),
            scale=layer["scale"],
            rotary=Rotary(*recorded["rotary"], True),
            observed=observed,
            budget_tokens=recorded["budget"],
            load_values=lambda: layer["values"],
            load_output_weights=lambda: layer["output"].unflatten(0, query_heads),
        )

    observed = None
    if policy.observation is not None:
        observed = policy.observation.observe(view(slots, None))
    return policy.score(view(policy.queries_needed, observed))


def compare(folder: Path) -> None:
    print("| prompt | press | kept (kvpress) | kept (ours) | same decision | overlap |")
    print("|---|---|---|---|---|---|")
    for path in sorted(folder.glob("*.pt"), key=lambda item: int(item.stem)):
        recorded = torch.load(path)
        for ours in make_comparisons():
            layers = recorded["layers"]
            if ours.press not in layers[0]["kept"]:
                continue
            theirs = torch.stack([layer["kept"][ours.press] for layer in layers])
            # kvpress keeps whole chunks, the short last one among them or not.
            chunked = ours.press == "chunkkv"
            average = int(theirs[0, 0].sum()) if chunked else recorded["budget"]
            _print_row(path.stem, ours.name, theirs, our_keeps(recorded, ours, average))


def _print_row(
    prompt: str, name: str, theirs: torch.Tensor, ours: torch.Tensor
) -> None:
    same = (ours == theirs).double().mean()
    overlap = (ours & theirs).sum() / theirs.sum()
    print(
        f"| {prompt} | {name} | {_span(theirs.sum(-1))} | {_span(ours.sum(-1))} "
        f"| {same:.5f} | {overlap:.5f} |"
    )


def _span(counts: torch.Tensor) -> str:
    smallest, largest = int(counts.min()), int(counts.max())
    return str(smallest) if smallest == largest else f"{smallest}–{largest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    first = steps.add_parser("record", help="run kvpress; needs its environment")
    first.add_argument("model")
    first.add_argument("folder", type=Path)
    first.add_argument("--text", type=Path, help="instead of generated sentences")
    second = steps.add_parser("compare", help="run our policies on the recording")
    second.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.step == "record":
        record(options.model, options.folder, options.text)
    else:
        compare(options.folder)


if __name__ == "__main__":
    main()
