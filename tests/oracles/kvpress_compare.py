"""Compares the tokens that our policies keep with kvpress. A manual check in two steps.

    python tests/oracles/kvpress_compare.py record MODEL FOLDER [--text FILE]
    python tests/oracles/kvpress_compare.py compare FOLDER...

``record`` needs kvpress (tested: 0.5.5 with transformers 5.2). It runs the model once
per prompt in float32 on the CPU and records, inside the attention layer's hook, what
every press would keep. ``compare`` needs this package and the model's tokenizer: it
gives our policies the recorded keys and queries and compares the kept positions.

A press returns keys and values without their positions. So its ``values`` argument is
replaced by the positions. For a press that reads values or attention, its ``score`` is
called instead, and the best tokens are selected as in ``ScorerPress.compress``.

KVzip runs the model again. Its press gets the cache of the prompt, as its context
manager would give it for a model without a chat template, and this records the keys and
queries of what it repeats.
"""

from __future__ import annotations

import argparse
import json
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
# Between the request to repeat and the repeated tokens, as kvpress and our policy write
# it for a model without a chat template.
NEWLINE = "\n"
KVZIP, KVZIP_LAYERWISE = "kvzip", "kvzip layerwise"
# DuoAttention gets the heads of this profile, of one model. Its own are downloaded.
DUO = "duo-attention"
HEADS = (
    Path(__file__).parents[2]
    / "vllm_kvplugins/budgets/head_profiles/smollm2-135m-instruct.json"
)
STREAMING, SINKS, RECENT = 0.6, 4, 32


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


def make_split(model: Any) -> dict[str, Any]:
    """DuoAttentionPress with the heads of ``HEADS``; nothing for another model."""
    import kvpress
    import numpy

    scores = numpy.array(json.loads(HEADS.read_text())["scores"])
    config = model.config
    if scores.shape != (config.num_hidden_layers, config.num_key_value_heads):
        return {}
    press = kvpress.DuoAttentionPress(head_compression_ratio=STREAMING)
    press.load_attention_pattern = lambda _: (SINKS, RECENT, scores)
    press.post_init_from_model(model)
    return {DUO: press}


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


def rotated_queries(module: Any, kwargs: Any) -> torch.Tensor:
    """[num_q_heads, tokens, head_dim], after RoPE."""
    from transformers.models.llama.modeling_llama import rotate_half

    cos, sin = (part[:, None] for part in kwargs["position_embeddings"])
    raw = module.q_proj(kwargs["hidden_states"]).unflatten(-1, (-1, module.head_dim))
    raw = getattr(module, "q_norm", lambda x: x)(raw).transpose(1, 2)
    return (raw * cos + rotate_half(raw) * sin)[0]


def record_repetition(
    model: Any, tokenizer: Any, cache: Any, tokens: list[int], budget: int
) -> dict[str, Any]:
    """The probes of KVzipPress and what it keeps, over all layers and by layer.

    Args:
        cache: holds ``tokens``, and holds them again afterwards.
    """
    import kvpress

    # A little below the exact ratio: this press truncates the tokens that it drops.
    press = kvpress.KVzipPress(1 - (budget - 0.001) / len(tokens))
    press._context_ids, press._cache = torch.tensor([tokens]), cache
    encoded = tokenizer.encode(NEWLINE, add_special_tokens=False)
    press._suffix_ids = torch.tensor([encoded], dtype=torch.int64)
    modules = [layer.self_attn for layer in model.model.layers]
    probes: list[dict[str, Any]] = []

    def start_probe(_: Any, __: Any, kwargs: Any) -> None:
        probes.append(
            {
                "token_ids": kwargs["input_ids"][0].tolist(),
                "about": (press.start_idx, press.end_idx),
                "queries": [],
                "keys": [],
            }
        )

    def hook(module: Any, _: Any, kwargs: Any, output: Any) -> None:
        # runs before the press's own hook, which removes these keys again
        keys = cache.layers[module.layer_idx].keys[0, :, len(tokens) :]
        probes[-1]["keys"].append(keys.clone())
        probes[-1]["queries"].append(rotated_queries(module, kwargs))

    hooks = [model.model.register_forward_pre_hook(start_probe, with_kwargs=True)]
    for module in modules:
        module.masked_key_indices = None
        hooks.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        press._perform_kvzip_compression(model, tokenizer)
    finally:
        for handle in hooks:
            handle.remove()
    kept = {KVZIP: take_masks(modules, cache)}
    press.layerwise = True
    press.compress_post(model)
    kept[KVZIP_LAYERWISE] = take_masks(modules, cache)
    return {"probes": probes, "kept": kept}


def take_masks(modules: list[Any], cache: Any) -> list[torch.Tensor]:
    """Per layer, bool [num_kv_heads, num_slots] of what is not masked; unmasks it."""
    kept = []
    for module in modules:
        keep = torch.ones(cache.layers[module.layer_idx].keys.shape[1:3]).bool()
        _, heads, slots = module.masked_key_indices
        keep[heads, slots] = False
        module.masked_key_indices = None
        kept.append(keep)
    return kept


@torch.no_grad()
def record_prompt(
    model: Any, tokenizer: Any, tokens: list[int], budget: int
) -> dict[str, Any]:
    """Keys, newest queries and every press's choice, layer by layer."""
    import kvpress

    # Models with several RoPE bases want the kind of layer.
    takes_kind = "layer_type" in signature(model.model.rotary_emb.forward).parameters
    # A little above the exact ratio: kvpress truncates tokens * (1 - ratio).
    presses = make_presses(1 - (budget + 0.01) / len(tokens)) | make_split(model)
    if takes_kind:
        del presses["expected-attention"]  # it does not name the kind
    layers: list[dict[str, Any]] = []

    def hook(module: Any, _: Any, kwargs: Any, output: Any) -> None:
        if getattr(module, "is_sliding", False):
            return  # a policy leaves this layer to vLLM
        cache = kwargs["past_key_values"].layers[module.layer_idx]
        hidden = kwargs["hidden_states"]
        queries = rotated_queries(module, kwargs)
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
        output = model.model(torch.tensor([tokens]), use_cache=True)
    finally:
        for handle in hooks:
            handle.remove()
    repeated: list[dict[str, Any]] = []
    if not takes_kind:  # KVzipPress refuses these models
        cache = output.past_key_values
        found = record_repetition(model, tokenizer, cache, tokens, budget)
        repeated = found["probes"]
        for name, kept in found["kept"].items():
            for layer, keep in zip(layers, kept, strict=True):
                layer["kept"][name] = keep
    version = getattr(kvpress, "__version__", "unknown")
    positions = torch.arange(len(tokens) + FUTURE)[None]
    kind = ["full_attention"] if takes_kind else []
    rotary = model.model.rotary_emb(torch.zeros(1), positions, *kind)
    half = rotary[0].shape[-1] // 2
    return {
        "layers": layers,
        "repeated": repeated,
        "tokens": tokens,
        "tokenizer": tokenizer.name_or_path,
        "budget": budget,
        "kvpress": version,
        "rotary": [part[0, :, :half] for part in rotary],
    }


def record(model_path: str, folder: Path, text_path: Path | None) -> None:
    from texts import english_tokens
    from transformers import AutoModelForCausalLM, AutoTokenizer

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
        recorded = record_prompt(model.eval(), tokenizer, tokens, budget)
        torch.save(recorded, folder / f"{length}.pt")
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
    split = parse_allocator({"name": "head-split", "profile": HEADS})
    kvzip, no_recent = policy("kvzip"), policy("kvzip", recent=0)
    ranked = parse_allocator({"name": "cross-layer", "safeguard": 0.0})
    alike = "safeguard 0, recent 0"
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
        Comparison(DUO, DUO, policy(DUO, sinks=SINKS, recent=RECENT), split),
        Comparison("kvzip", KVZIP, kvzip, kvzip.allocator),
        Comparison("kvzip, safeguard 0", KVZIP, kvzip, ranked),
        Comparison(f"kvzip, {alike}", KVZIP, no_recent, ranked),
        Comparison(
            f"{KVZIP_LAYERWISE}, {alike}", KVZIP_LAYERWISE, no_recent, adaptive(0.0)
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
    probes = our_probes(recorded, ours)
    scores = torch.stack([our_scores(recorded, i, ours.policy, probes) for i in layers])
    scores = ours.adapt(scores)
    available = torch.full(scores.shape[:2], scores.shape[2])
    return keep_top(scores, ours.allocator.allocate(scores, average, 1, available))


def our_probes(
    recorded: dict[str, Any], ours: Comparison
) -> list[tuple[Any, dict[str, Any]]]:
    """Probes of the policy, with their recorded keys and queries.

    Raises:
        ValueError: the policy would run other tokens than the recorded ones.
    """
    from transformers import AutoTokenizer

    from vllm_kvplugins.policies.capabilities import Probe, ProbeOccasion

    if ours.policy.probing is None:
        return []
    runs = recorded["repeated"]
    probes = [Probe(run["token_ids"], range(*run["about"])) for run in runs]
    tokenizer = AutoTokenizer.from_pretrained(recorded["tokenizer"])
    tokens = recorded["tokens"]
    occasion = ProbeOccasion(
        prompt=tokens,
        since=0,
        tokens=len(tokens),
        room=sys.maxsize,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
    if ours.policy.probing.probes(occasion) != probes:
        raise ValueError(f"{ours.name}: the policy repeats other tokens")
    return list(zip(probes, runs, strict=True))


def our_scores(
    recorded: dict[str, Any],
    index: int,
    policy: Any,
    probes: list[tuple[Any, dict[str, Any]]],
) -> torch.Tensor:
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
    for probe, run in probes:
        keys = torch.cat([layer["keys"], run["keys"][index]], 1)
        observed = policy.probing.observe(
            make_layer_view(
                keys=keys,
                positions=torch.arange(keys.shape[1]).expand(heads, -1),
                queries=run["queries"][index],
                query_positions=torch.arange(slots, keys.shape[1]),
                scale=layer["scale"],
                observed=observed,
                probe=probe,
            )
        )
    return policy.score(view(policy.queries_needed, observed))


def compare(folders: list[Path]) -> None:
    """Prints a row per comparison, with a column per recorded prompt."""
    paths = [
        path
        for folder in folders
        for path in sorted(folder.glob("*.pt"), key=lambda item: int(item.stem))
    ]
    rows = {ours.name: [ours.name] for ours in make_comparisons()}
    for path in paths:
        recorded = torch.load(path)
        for ours in make_comparisons():
            rows[ours.name].append(agreement(recorded, ours))
    titles = ["press", *(f"{path.parent.name}, {path.stem}" for path in paths)]
    for row in titles, ["---"] * len(titles), *rows.values():
        print(f"| {' | '.join(row)} |")


def agreement(recorded: dict[str, Any], ours: Comparison) -> str:
    """Same decision and overlap; "-" if the press was not recorded."""
    layers = recorded["layers"]
    if ours.press not in layers[0]["kept"]:
        return "-"
    theirs = torch.stack([layer["kept"][ours.press] for layer in layers])
    average = recorded["budget"]
    if ours.press == "chunkkv":
        # kvpress keeps whole chunks, the short last one among them or not.
        average = int(theirs[0, 0].sum())
    elif ours.press == DUO:
        # A share of the heads, not a budget; the rounding takes a part of one head.
        average = int(theirs.sum()) // theirs[..., 0].numel()
    kept = our_keeps(recorded, ours, average)
    same = (kept == theirs).double().mean()
    overlap = (kept & theirs).sum() / theirs.sum()
    return f"{same:.5f} / {overlap:.5f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    first = steps.add_parser("record", help="run kvpress; needs its environment")
    first.add_argument("model")
    first.add_argument("folder", type=Path)
    first.add_argument("--text", type=Path, help="instead of generated sentences")
    second = steps.add_parser("compare", help="run our policies on the recording")
    second.add_argument("folders", type=Path, nargs="+")
    options = parser.parse_args()
    if options.step == "record":
        record(options.model, options.folder, options.text)
    else:
        compare(options.folders)


if __name__ == "__main__":
    main()
