"""``kvplugins research calibrate``: measure how sensitive each layer is to eviction."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError
from rich.markup import escape

from vllm_kvplugins.cli import documents
from vllm_kvplugins.cli.console import out, user_errors
from vllm_kvplugins.cli.inputs import Model, check_targets, load_tokenizer
from vllm_kvplugins.errors import KVPolicyError, coded, refuse

if TYPE_CHECKING:
    from vllm_kvplugins.budgets.sensitivity_profile import (
        DocumentSensitivity,
        MeasureSettings,
        SensitivityProfile,
    )
    from vllm_kvplugins.model_config import ConfigOnlyModel


def calibrate(
    model: Model,
    out_path: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="PROFILE.json",
            help="Where to write; default: the user's cache, where servers find it.",
        ),
    ] = None,
    document: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="F",
            help="UTF-8 text to measure on; several are averaged. Default: a story "
            "included in this package.",
        ),
    ] = None,
    budget: Annotated[
        int,
        typer.Option(
            metavar="M", min=1, help="Tokens that a query of the second pass sees."
        ),
    ] = 1024,
    sinks: Annotated[
        int, typer.Option(metavar="N", min=0, help="Sinks among them.")
    ] = 4,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="Maximum length of each document.")
    ] = 8192,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of weights and keys.")
    ] = "float32",
) -> None:
    """Measure each layer's sensitivity for the allocator `sensitivity` (EpiCache)."""
    with user_errors():
        _check_target(out_path)
        settings = _settings(budget, sinks, dtype)
        config = documents.check_model(model, dtype)
        texts = documents.read(document or [])
        profile = _measure(model, config, texts, settings, max_tokens)
        path = _write(profile, model, out_path)
    _print_summary(profile, path)
    if out_path is None:
        _print_use(profile)


def _check_target(path: Path | None) -> None:
    """Check before a long run that the profile can be written; None: to the cache.

    Raises:
        KVPolicyError: it cannot.
    """
    if path is not None:
        check_targets(path)
        return
    from vllm_kvplugins.budgets.profile_cache import cache_folder

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    check_targets(folder / "profile.json")


def _unwritable(path: Path, error: OSError) -> KVPolicyError:
    reason = f"cannot write {path}: {error.strerror}; choose another path with -o"
    return KVPolicyError(coded("KVP602", reason))


def _settings(budget: int, sinks: int, dtype: str) -> MeasureSettings:
    from vllm_kvplugins.budgets.sensitivity_profile import MeasureSettings

    try:
        return MeasureSettings(budget=budget, sinks=sinks, dtype=dtype)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise KVPolicyError(coded("KVP603", reason)) from error


def _measure(
    model: str,
    config: ConfigOnlyModel,
    texts: dict[str, str],
    settings: MeasureSettings,
    max_tokens: int,
) -> SensitivityProfile:
    from vllm_kvplugins import __version__
    from vllm_kvplugins.budgets.profile_cache import model_name
    from vllm_kvplugins.budgets.sensitivity_profile import (
        SensitivityProfile,
        mean_sensitivity,
    )
    from vllm_kvplugins.model_config import ConfigOnlyModel
    from vllm_kvplugins.training.sensitivity import load_model

    tokenizer = load_tokenizer(model)
    positions = config.max_positions or max_tokens
    tokens = _tokens(tokenizer, texts, min(max_tokens, positions), settings.budget)
    loaded = load_model(model, settings.dtype)
    fingerprint = ConfigOnlyModel(model, "", loaded.config.to_dict()).fingerprint()
    with documents.progress(len(tokens) * fingerprint.num_layers) as progress:
        measured = [
            _measure_one(loaded, name, texts[name], ids, settings, progress)
            for name, ids in tokens.items()
        ]
    return SensitivityProfile(
        plugin=__version__,
        model=model_name(model),
        fingerprint=fingerprint,
        settings=settings,
        documents=tuple(measured),
        sensitivity=mean_sensitivity(measured),
    )


def _tokens(
    tokenizer: Any, texts: dict[str, str], max_tokens: int, budget: int
) -> dict[str, list[int]]:
    """Token IDs by file name.

    Raises:
        KVPolicyError: a document is not longer than the budget; lists all of them.
    """
    tokens = {name: tokenizer.encode(text)[:max_tokens] for name, text in texts.items()}
    refuse(
        f"with a budget of {budget} tokens nothing would be masked",
        [
            coded(
                "KVP640",
                f"{name} has {len(ids)} tokens (maximum {max_tokens}); give a longer "
                "document or a smaller --budget",
            )
            for name, ids in tokens.items()
            if len(ids) <= budget
        ],
    )
    return tokens


def _measure_one(
    loaded: Any,
    name: str,
    text: str,
    ids: list[int],
    settings: MeasureSettings,
    progress: Any,
) -> DocumentSensitivity:
    from vllm_kvplugins.budgets.sensitivity_profile import DocumentSensitivity
    from vllm_kvplugins.training.sensitivity import layer_sensitivity

    def layer_done(layer: int) -> None:
        progress(f"{name}: {len(ids)} tokens, layer {layer}")

    return DocumentSensitivity(
        name=name,
        tokens=len(ids),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        sensitivity=tuple(layer_sensitivity(loaded, ids, settings, layer_done)),
    )


def _write(profile: SensitivityProfile, model: str, path: Path | None) -> Path:
    """Write the profile, by default into the cache; return where."""
    from vllm_kvplugins.budgets.profile_cache import cache_folder, store
    from vllm_kvplugins.budgets.sensitivity_profile import write_profile

    try:
        if path is None:
            return store(profile, model)
        write_profile(profile, path)
    except OSError as error:
        raise _unwritable(path or cache_folder(), error) from error
    return path


def _print_use(profile: SensitivityProfile) -> None:
    """Say which servers use a profile in the cache."""
    from vllm_kvplugins.budgets.sensitivity_profile import shipped_profile

    shipped = shipped_profile(profile.fingerprint)
    if shipped is None:
        use = 'servers with "allocator": "sensitivity" use it from their next start on'
    else:
        use = (
            f"servers use the shipped {shipped.name} before it; to use this one, give "
            "its path as `profile`"
        )
    out().print(escape(use), soft_wrap=True)


def _print_summary(profile: SensitivityProfile, path: Path) -> None:
    console, values = out(), profile.sensitivity
    most, least = values.index(max(values)), values.index(min(values))
    console.print(
        f"[bold]{escape(profile.model)}[/]  {len(values)} layers, budget "
        f"{profile.settings.budget} with {profile.settings.sinks} sinks"
    )
    for read in profile.documents:
        console.print(f"read {read.tokens} tokens of {escape(read.name)}")
    console.print(
        f"most sensitive: layer {most} ({max(values):.4g}), least: layer {least} "
        f"({min(values):.4g})"
    )
    console.print(f"wrote {escape(str(path))}", soft_wrap=True)
