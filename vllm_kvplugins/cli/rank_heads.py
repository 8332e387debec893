"""``kvplugins research rank-heads``: measure which heads look back."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from vllm_kvplugins.cli import documents
from vllm_kvplugins.cli.console import out, user_errors
from vllm_kvplugins.cli.inputs import Model, check_targets, load_tokenizer
from vllm_kvplugins.errors import KVPolicyError, coded, refuse

if TYPE_CHECKING:
    from vllm_kvplugins.budgets.head_profile import HeadProfile

# Sinks and newest tokens do not count, so a text needs more.
_LEAST_TOKENS = 64


def rank_heads(
    model: Model,
    out_path: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="HEADS.json", help="Where to write."),
    ],
    document: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="F",
            help="UTF-8 text to repeat; several are averaged. Default: a story "
            "included in this package.",
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", min=_LEAST_TOKENS, help="Maximum length of each document."
        ),
    ] = 2048,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of weights and keys.")
    ] = "float32",
) -> None:
    """Measure which KV heads look back, for the allocator `head-split`."""
    with user_errors():
        check_targets(out_path)
        documents.check_model(model, dtype)
        texts = documents.read(document or [])
        profile = _measure(model, texts, max_tokens, dtype)
        _write(profile, out_path)
    _print_summary(profile, out_path)


def _measure(
    model: str, texts: dict[str, str], max_tokens: int, dtype: str
) -> HeadProfile:
    from vllm_kvplugins import __version__
    from vllm_kvplugins.budgets.head_profile import (
        HeadProfile,
        RepeatedDocument,
        mean_scores,
    )
    from vllm_kvplugins.budgets.profile_cache import model_name
    from vllm_kvplugins.model_config import ConfigOnlyModel, read_model_config
    from vllm_kvplugins.training.head_scores import REQUEST, head_scores, load_model

    tokenizer = load_tokenizer(model)
    request = tokenizer.encode(REQUEST, add_special_tokens=False)
    positions = read_model_config(model, dtype).max_positions
    if positions is not None:
        max_tokens = min(max_tokens, (positions - len(request)) // 2)
    tokens = _tokens(tokenizer, texts, max_tokens)
    loaded = load_model(model, dtype)
    fingerprint = ConfigOnlyModel(model, "", loaded.config.to_dict()).fingerprint()
    scores = []
    with documents.progress(len(tokens) * fingerprint.num_layers) as progress:
        for name, ids in tokens.items():

            def layer_done(layer: int, name: str = name) -> None:
                progress(f"{name}: layer {layer}")

            scores.append(head_scores(loaded, ids, request, layer_done))
    return HeadProfile(
        plugin=__version__,
        model=model_name(model),
        fingerprint=fingerprint,
        dtype=dtype,
        documents=tuple(
            RepeatedDocument(
                name=name,
                tokens=len(ids),
                sha256=hashlib.sha256(texts[name].encode()).hexdigest(),
            )
            for name, ids in tokens.items()
        ),
        scores=mean_scores(scores),
    )


def _tokens(
    tokenizer: Any, texts: dict[str, str], max_tokens: int
) -> dict[str, list[int]]:
    """Token IDs by file name.

    Raises:
        KVPolicyError: a document is too short; lists all of them.
    """
    tokens = {name: tokenizer.encode(text)[:max_tokens] for name, text in texts.items()}
    refuse(
        "the heads cannot be ranked",
        [
            coded(
                "KVP640",
                f"{name} has {len(ids)} tokens (maximum {max_tokens}); give a document "
                f"with {_LEAST_TOKENS} or more",
            )
            for name, ids in tokens.items()
            if len(ids) < _LEAST_TOKENS
        ],
    )
    return tokens


def _write(profile: HeadProfile, path: Path) -> None:
    from vllm_kvplugins.budgets.head_profile import write_head_profile

    try:
        write_head_profile(profile, path)
    except OSError as error:
        reason = f"cannot write {path}: {error.strerror}; choose another path with -o"
        raise KVPolicyError(coded("KVP602", reason)) from error


def _print_summary(profile: HeadProfile, path: Path) -> None:
    console = out()
    ranked = sorted(
        (
            (score, layer, head)
            for layer, row in enumerate(profile.scores)
            for head, score in enumerate(row)
        ),
        key=lambda entry: -entry[0],
    )
    console.print(
        f"[bold]{escape(profile.model)}[/]  {len(ranked)} KV heads in "
        f"{len(profile.scores)} layers"
    )
    for read in profile.documents:
        console.print(f"repeated {read.tokens} tokens of {escape(read.name)}")
    best = ", ".join(
        f"{layer}.{head} ({score:.3f})" for score, layer, head in ranked[:5]
    )
    median = ranked[len(ranked) // 2][0]
    console.print(
        f"look back most: layer.head {best}; median {median:.3f}", soft_wrap=True
    )
    console.print(f"wrote {escape(str(path))}", soft_wrap=True)
    console.print(
        escape(
            f'use it with "allocator": {{"name": "head-split", "profile": "{path}"}}'
        ),
        soft_wrap=True,
    )
