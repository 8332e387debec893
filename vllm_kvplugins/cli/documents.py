"""What commands share that run a model over documents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from vllm_kvplugins.cli.inputs import read_text
from vllm_kvplugins.errors import KVPolicyError, coded, refuse

if TYPE_CHECKING:
    from vllm_kvplugins.model_config import ConfigOnlyModel

OWN_TEXT = "harrow-bend.txt"


def check_model(model: str, dtype: str) -> ConfigOnlyModel:
    """Refuse models that no policy supports, before their weights are loaded."""
    from vllm_kvplugins.model_config import read_model_config
    from vllm_kvplugins.vllm_adapter.config import validation

    config = read_model_config(model, dtype)
    refuse(f"{model} cannot be calibrated", validation.calibration_problems(config))
    return config


def read(paths: list[Path]) -> dict[str, str]:
    """Texts by file name; the text of this package if the user gives none."""
    if not paths:
        own = resources.files("vllm_kvplugins.training") / OWN_TEXT
        return {OWN_TEXT: own.read_text(encoding="utf-8")}
    texts = {path.name: read_text(path, "document", "--document") for path in paths}
    if len(texts) < len(paths):
        raise KVPolicyError(
            coded(
                "KVP641",
                f"two documents have the same file name ({_repeated(paths)}); "
                "rename one",
            )
        )
    return texts


def _repeated(paths: list[Path]) -> str:
    names = [path.name for path in paths]
    return next(name for name in names if names.count(name) > 1)


@contextmanager
def progress(steps: int) -> Iterator[Any]:
    """Show a progress bar; yield a function that counts a step and describes it."""
    console = Console(stderr=True, highlight=False)
    columns = (
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("first layer", total=steps)

        def step(description: str) -> None:
            bar.update(task, advance=1, description=escape(description))

        yield step
