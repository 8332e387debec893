"""A simulated GPU: tensors report CUDA as their device, but live on the CPU.

It refuses what a GPU refuses (operations between tensors of two devices), and counts
everything that makes the host wait: values read by the host, shapes that depend on
values, and synchronous copies. The package's compiled ops do not support this device,
so their torch versions run.

Data of an asynchronous copy to the host is garbage until the host has waited for an
event recorded after the copy.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_host import HOST_SEAMS, PretendedHost
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
# Shapes of their results depend on numbers, or the host gets one.
_WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
    aten.is_nonzero.default,
}
_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
_PINNING = {aten.is_pinned.default: False, aten._pin_memory.default: None}
_COPIES = {aten._to_copy.default, aten.copy_.default}


class Pretending(torch.Tensor):
    """A tensor of the pretended GPU; ``numbers`` are its contents."""

    numbers: torch.Tensor

    @staticmethod
    def of(numbers: torch.Tensor) -> Pretending:
        made = torch.Tensor._make_wrapper_subclass(
            Pretending,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=CUDA,
        )
        made.numbers = numbers
        return made

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def item(self) -> Any:
        if PretendedGPU.active is not None:
            PretendedGPU.active.waits.append(_where("item"))
        return self.numbers.item()

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def tolist(self) -> Any:
        if PretendedGPU.active is not None:
            PretendedGPU.active.waits.append(_where("tolist"))
        return self.numbers.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"Pretending({self.numbers!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


@functools.cache
def _load_guard() -> None:
    """CPU builds of torch know no device guard for CUDA; compile one that does nothing.

    Builds for CUDA bring one, on machines without a GPU as well.
    """
    torch._C._ensureCUDADeviceGuardSet()
    if torch.version.cuda is not None:
        return
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    root = Path(torch.__file__).parent
    source = Path(__file__).with_name("no_cuda_guard.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "guard.so")
        include, lib = f"-I{root / 'include'}", f"-L{root / 'lib'}"
        command = [compiler, "-shared", "-fPIC", "-std=c++20", include, str(source)]
        subprocess.run([*command, lib, "-lc10", "-o", str(library)], check=True)
        ctypes.CDLL(str(library))


class Event:
    """Behind all that was sent to the host, and read there by its stream, before it."""

    def record(self, stream: Any = None) -> None:
        assert PretendedGPU.active is not None
        self.sent = list(PretendedGPU.active.sent)
        self.reads = (stream or current_stream()).reads.copy()

    def synchronize(self) -> None:
        """The host waits."""
        assert PretendedGPU.active is not None
        PretendedGPU.active.waits.append(_where("synchronize"))
        PretendedGPU.active.arrive(self.sent)
        PretendedGPU.active.host.over(self.reads)

    def query(self) -> bool:
        """Nothing that reads the host's memory is over before somebody waits for it."""
        assert PretendedGPU.active is not None
        return not PretendedGPU.active.host.under_way(self.reads)

    def wait(self, stream: Any = None) -> None:
        """A stream goes on behind it."""
        (stream or current_stream()).reads |= self.reads


class Stream:
    """Runs everything at once, but for the reading of the host's memory, which may be
    late."""

    def __init__(self, device: Any = None) -> None:
        assert PretendedGPU.active is not None, "a stream where there is no GPU"
        self.reads: set[int] = set()  # numbers of those that it was handed

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


_here = threading.local()


def current_stream(device: Any = None) -> Stream:
    assert PretendedGPU.active is not None
    return getattr(_here, "stream", None) or PretendedGPU.active.stream


@contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    _here.stream = stream
    yield
    _here.stream = None


class PretendedGPU(TorchDispatchMode):
    """While it is active there is one. Threads that are given work while it is know it.

    Attributes:
        waits: where the host would have waited, innermost call of the package first.
        sent: copies to the host that nobody has waited for: where to, and what.
        host: memory of the host that it reads by itself.
    """

    active: PretendedGPU | None = None

    def __init__(self) -> None:
        super().__init__()
        _load_guard()
        self.waits: list[str] = []
        self.sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._patches: list[Any] = []
        self._lock = threading.Lock()
        self.host = PretendedHost()

    def send(self, target: torch.Tensor, numbers: torch.Tensor) -> None:
        """An asynchronous copy to the host."""
        target.fill_(torch.nan if target.is_floating_point() else -(2**30))
        with self._lock:
            self.sent.append((target, numbers.clone()))

    def arrive(self, sent: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """These have been waited for."""
        with self._lock:
            for each in sent:
                if any(each is other for other in self.sent):
                    self.sent = [other for other in self.sent if other is not each]
                    each[0].copy_(each[1])

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        self._patches.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def __enter__(self):
        gpu, submit = self, ThreadPoolExecutor.submit

        def submit_here(pool, work, *args, **kwargs):
            def run_here():
                with _OtherThread(gpu):
                    return work(*args, **kwargs)

            return submit(pool, run_here)

        self._patch(ThreadPoolExecutor, "submit", submit_here)
        self._patch(torch.cuda, "_lazy_init", lambda: None)
        made = {"Event": Event, "Stream": Stream, "stream": _stream}
        for name, value in (made | {"current_stream": current_stream}).items():
            self._patch(torch.cuda, name, value)
        for owner, name in HOST_SEAMS:
            self._patch(owner, name, getattr(self.host, name))
        # torch.tensor makes a tensor on the CPU then, and moves it
        torch._C._set_only_lift_cpu_tensors(True)
        PretendedGPU.active, self.stream = self, None
        self.stream = Stream()
        return super().__enter__()

    def __exit__(self, *raised):
        torch._C._set_only_lift_cpu_tensors(False)
        for owner, name, value in reversed(self._patches):
            setattr(owner, name, value)
        self._patches = []
        PretendedGPU.active = None
        return super().__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {}, self)


class _OtherThread(TorchDispatchMode):
    """The GPU, in a thread that was given work."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {}, self._gpu)


def run(
    func: Any, args: Any, kwargs: dict[str, Any], gpu: PretendedGPU | None = None
) -> Any:
    """One operation, on the numbers."""
    if func in _PINNING:
        return args[0] if _PINNING[func] is None else _PINNING[func]
    kwargs = dict(kwargs)
    flat, _ = tree_flatten((args, kwargs))
    tensors = [t for t in flat if isinstance(t, torch.Tensor)]
    here = [t for t in tensors if isinstance(t, Pretending)]
    asked = kwargs.get("device")
    on_gpu = torch.device(asked).type == "cuda" if asked is not None else bool(here)
    if asked is not None:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    if func not in _COPIES:
        _refuse_mixtures(func, tensors)
    if gpu is not None and _waits(func, args, kwargs, here, on_gpu):
        gpu.waits.append(_where(func))
    plain = tree_map(_numbers, (args, kwargs))
    late = func is aten.copy_.default and len(args) > 2 and args[2]
    if late and isinstance(args[1], Pretending) and not isinstance(args[0], Pretending):
        assert PretendedGPU.active is not None
        PretendedGPU.active.send(args[0], plain[0][1])
        return args[0]
    found = func(*plain[0], **plain[1])
    if func in _COPIES and asked is None:
        on_gpu = isinstance(args[0], Pretending)
    owners = {id(_numbers(t)): t for t in here}
    return tree_map(lambda t: _wrapped(t, owners) if on_gpu else t, found)


def _numbers(tensor: Any) -> Any:
    return tensor.numbers if isinstance(tensor, Pretending) else tensor


def _wrapped(found: Any, owners: dict[int, Pretending]) -> Any:
    if not isinstance(found, torch.Tensor):
        return found
    return owners.get(id(found)) if id(found) in owners else Pretending.of(found)


def _refuse_mixtures(func: Any, tensors: list[torch.Tensor]) -> None:
    devices = {isinstance(t, Pretending) for t in tensors if t.dim()}
    if len(devices) > 1 and func not in _INDEXING:
        raise RuntimeError(f"{func} on tensors of two devices")


def _waits(func: Any, args: Any, kwargs: Any, here: list[Any], on_gpu: bool) -> bool:
    if func in _WAITS:
        return bool(here)
    if func in _INDEXING:
        indices = [i for i in args[1] if i is not None]
        foreign = any(not isinstance(i, Pretending) for i in indices)
        masks = any(i.dtype in (torch.bool, torch.uint8) for i in indices)
        return bool(here) and (foreign or masks)
    if func is aten._to_copy.default:
        crosses = isinstance(args[0], Pretending) != on_gpu
        return crosses and not kwargs.get("non_blocking")
    if func is aten.copy_.default:
        crosses = isinstance(args[0], Pretending) != isinstance(args[1], Pretending)
        return crosses and not (len(args) > 2 and args[2])
    return False


def _where(func: Any) -> str:
    """The operation, and the line of the package that asked for it."""
    ours = [f for f in traceback.extract_stack() if "vllm_kvplugins/" in f.filename]
    last = ours[-1] if ours else None
    return f"{func}" + (f" at {last.filename}:{last.lineno}" if last else "")
