"""Report what a vLLM changed of the names that this package uses.

    python scripts/check_vllm_drift.py 0.33.0
    python scripts/check_vllm_drift.py path/to/vllm.whl
    python scripts/check_vllm_drift.py path/to/checkout
    python scripts/check_vllm_drift.py --pre

The argument is a version, which pip downloads as a wheel (by default the newest), a
wheel, or a folder that contains the package ``vllm``. Nothing is imported or compiled:
the sources are parsed and compared with ``vllm_adapter/config/seams.py`` and with the
installed vLLM. Where pip looks for nightly builds is pip's configuration.

"gone" lists what would be refused at start-up (KVP002). "changed" lists functions whose
parameters differ from those of the installed vLLM: where we override them, new
parameters may be passed to us. Exit code: 0 if nothing is gone, 1 if something is, 2 if
there is nothing to examine.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from _vllm_source import Defined, Source

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm_kvplugins.vllm_adapter.config.seams import Seam, all_seams


def uses() -> Iterator[tuple[str, str, list[str] | None]]:
    """Place, name, and parameters of a function, of all names on all devices."""
    seams: list[Seam] = [*all_seams(on_cpu=True), *all_seams(on_cpu=False)]
    for seam in seams:
        for name, parameters in seam.names():
            yield seam.where, name, parameters


def gone(source: Source) -> list[str]:
    """Names and parameters that a vLLM lacks."""
    lines: list[str] = []
    for where, name, parameters in uses():
        owner = source.find(where)
        if owner is None:
            lines.append(where)
        elif isinstance(owner, Defined):
            member = source.member(owner, name)
            taken = member.parameters if isinstance(member, Defined) else None
            if member is None:
                lines.append(f"{where} {name}")
            elif parameters and taken is not None:
                missing = [each for each in parameters if each not in taken]
                lines += [f"{where} {name}({each})" for each in missing]
    return list(dict.fromkeys(lines))


def changed(source: Source, before: Source) -> list[str]:
    """Functions that we call or override and whose parameters are not as before."""
    lines: list[str] = []
    for where, name, used in uses():
        now, then = (_parameters(each, where, name) for each in (source, before))
        if used is None or now is None or then is None or now == then:
            continue
        new = [f"+{each}" for each in now if each not in then]
        old = [f"-{each}" for each in then if each not in now]
        lines.append(f"{where} {name}: {' '.join(new + old) or 'another order'}")
    return list(dict.fromkeys(lines))


def _parameters(source: Source, where: str, name: str) -> list[str] | None:
    owner = source.find(where)
    member = source.member(owner, name) if isinstance(owner, Defined) else None
    return member.parameters if isinstance(member, Defined) else None


def unpacked(wheel: Path, folder: Path) -> Path:
    """The Python files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if re.fullmatch(r"vllm/.*\.py", n)]
        archive.extractall(folder, names)
    return folder


def downloaded(version: str, pre: bool, folder: Path) -> Path:
    """The wheel of a version, from where pip looks for packages."""
    wanted = f"vllm=={version}" if version else "vllm"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--only-binary", ":all:", "--dest", str(folder), wanted]
    done = subprocess.run(
        [*command, *(["--pre"] if pre else [])], capture_output=True, text=True
    )
    wheels = list(folder.glob("vllm-*.whl"))
    if not wheels:
        print(done.stderr.strip(), file=sys.stderr)
        print(
            f"error: pip downloaded no wheel of {wanted}; name another version, a "
            "wheel or a folder",
            file=sys.stderr,
        )
        raise typer.Exit(2)
    return wheels[0]


def source_of(vllm: str, pre: bool, folder: Path) -> Path:
    """The folder that contains the package of what the command line names."""
    path = Path(vllm)
    if vllm and path.is_dir():
        if not (path / "vllm" / "__init__.py").is_file():
            print(
                f"error: {path} has no vllm/__init__.py; name the folder that contains "
                "the package",
                file=sys.stderr,
            )
            raise typer.Exit(2)
        return path
    if path.suffix == ".whl":
        if not path.is_file():
            print(f"error: there is no wheel {path}", file=sys.stderr)
            raise typer.Exit(2)
        return unpacked(path, folder / "tree")
    return unpacked(downloaded(vllm, pre, folder), folder / "tree")


def main(
    vllm: Annotated[
        str, typer.Argument(help="a version, a wheel, or a folder; empty: the newest")
    ] = "",
    pre: Annotated[bool, typer.Option("--pre", help="also pre-releases")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Report what a vLLM changed of the names that this package uses."""
    spec = find_spec("vllm")
    with tempfile.TemporaryDirectory() as folder:
        source = Source(source_of(vllm, pre, Path(folder)))
        report = {"gone": gone(source), "changed": []}
        if spec is not None and spec.origin is not None:
            report["changed"] = changed(source, Source(Path(spec.origin).parents[1]))
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        for kind, lines in report.items():
            print(f"{kind}: {len(lines)}")
            print("".join(f"  {line}\n" for line in lines), end="")
    raise typer.Exit(1 if report["gone"] else 0)


if __name__ == "__main__":
    typer.run(main)
