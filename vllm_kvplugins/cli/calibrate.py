"""``kvplugins research calibrate``: measure how sensitive each layer is to eviction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from vllm_kvplugins.cli.console import out, user_errors
from vllm_kvplugins.cli.inputs import Model, check_targets, load_tokenizer, read_text
from vllm_kvplugins.errors import KVPolicyError, coded, refuse

if TYPE_CHECKING:
    from vllm_kvplugins.budgets.sensitivity_profile import (
        DocumentSensitivity,
        MeasureSettings,
        SensitivityProfile,
    )
    from vllm_kvplugins.model_config import ConfigOnlyModel

OWN_TEXT = "harrow-bend.txt"


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
        config = _checked_config(model, dtype)
        texts = _texts(document or [])
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


def _checked_config(model: str, dtype: str) -> ConfigOnlyModel:
    """Refuse models that no policy supports, before their weights are loaded."""
    from vllm_kvplugins.model_config import read_model_config
    from vllm_kvplugins.vllm_adapter.config import validation

    config = read_model_config(model, dtype)
    refuse(f"{model} cannot be calibrated", validation.calibration_problems(config))
    return config


def _texts(documents: list[Path]) -> dict[str, str]:
    """Texts by file name; the text of this package if the user gives none."""
    if not documents:
        own = resources.files("vllm_kvplugins.training") / OWN_TEXT
        return {OWN_TEXT: own.read_text(encoding="utf-8")}
    texts = {path.name: read_text(path, "document", "--document") for path in documents}
    if len(texts) < len(documents):
        raise KVPolicyError(
            coded(
                "KVP641",
                f"two documents have the same file name ({_repeated(documents)}); "
                "rename one",
            )
        )
    return texts


def _repeated(documents: list[Path]) -> str:
    names = [path.name for path in documents]
    return next(name for name in names if names.count(name) > 1)


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
    with _progress(len(tokens) * fingerprint.num_layers) as progress:
        documents = [
            _measure_one(loaded, name, texts[name], ids, settings, progress)
            for name, ids in tokens.items()
        ]
    return SensitivityProfile(
        plugin=__version__,
        model=model_name(model),
        fingerprint=fingerprint,
        settings=settings,
        documents=tuple(documents),
        sensitivity=mean_sensitivity(documents),
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


@contextmanager
def _progress(steps: int) -> Iterator[Any]:
    """Show a progress bar; yield a function that counts a step and describes it."""
    console = Console(stderr=True, highlight=False)
    columns = (
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("first layer", total=steps)

        def step(description: str) -> None:
            progress.update(task, advance=1, description=escape(description))

        yield step


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
