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
from simulated_host import HOST_SEAMS, SimulatedHost
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
# Operations whose result is a number on the host, or has a shape that depends on one.
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


class GpuTensor(torch.Tensor):
    """A tensor of the simulated GPU; ``numbers`` are its contents."""

    numbers: torch.Tensor

    @staticmethod
    def of(numbers: torch.Tensor) -> GpuTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            GpuTensor,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=CUDA,
        )
        tensor.numbers = numbers
        return tensor

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def item(self) -> Any:
        if SimulatedGPU.active is not None:
            SimulatedGPU.active.waits.append(_where("item"))
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
        if SimulatedGPU.active is not None:
            SimulatedGPU.active.waits.append(_where("tolist"))
        return self.numbers.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({self.numbers!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


@functools.cache
def _load_guard() -> None:
    """Give CPU builds of torch a device guard for CUDA that does nothing.

    Builds for CUDA contain a guard, also on machines without a GPU.
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
    """Marks the copies to the host and the reads of a stream before it."""

    def record(self, stream: Any = None) -> None:
        assert SimulatedGPU.active is not None
        self.sent = list(SimulatedGPU.active.sent)
        self.reads = (stream or current_stream()).reads.copy()

    def synchronize(self) -> None:
        """Make the host wait for the marked copies and reads."""
        assert SimulatedGPU.active is not None
        SimulatedGPU.active.waits.append(_where("synchronize"))
        SimulatedGPU.active.arrive(self.sent)
        SimulatedGPU.active.host.over(self.reads)

    def query(self) -> bool:
        """Whether all marked reads have ended, each when the host waited for it.

        Then the marked copies have arrived, too.
        """
        assert SimulatedGPU.active is not None
        if SimulatedGPU.active.host.under_way(self.reads):
            return False
        SimulatedGPU.active.arrive(self.sent)
        return True

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait for this event."""
        (stream or current_stream()).reads |= self.reads


class Stream:
    """Runs operations immediately; only reads of host memory may be late."""

    def __init__(self, device: Any = None) -> None:
        assert SimulatedGPU.active is not None, "a stream where there is no GPU"
        self.reads: set[int] = set()  # IDs of the reads on this stream

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


_here = threading.local()


def current_stream(device: Any = None) -> Stream:
    assert SimulatedGPU.active is not None
    return getattr(_here, "stream", None) or SimulatedGPU.active.stream


@contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    _here.stream = stream
    yield
    _here.stream = None


class SimulatedGPU(TorchDispatchMode):
    """While this mode is active, torch sees one GPU.

    Threads that receive work while the mode is active see it too.

    Attributes:
        waits: places where the host would have waited, innermost call first.
        sent: copies to the host that the host has not waited for: target and values.
        host: host memory that the GPU reads directly.
    """

    active: SimulatedGPU | None = None

    def __init__(self) -> None:
        super().__init__()
        _load_guard()
        self.waits: list[str] = []
        self.sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._patches: list[Any] = []
        self._lock = threading.Lock()
        self.host = SimulatedHost()

    def send(self, target: torch.Tensor, numbers: torch.Tensor) -> None:
        """Start an asynchronous copy to the host."""
        if target.dtype == torch.uint8:
            target.fill_(127)  # NaN of e4m3
        else:
            target.fill_(torch.nan if target.is_floating_point() else -(2**30))
        with self._lock:
            self.sent.append((target, numbers.clone()))

    def arrive(self, sent: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Complete copies that the host has waited for."""
        with self._lock:
            for copy in sent:
                if any(copy is other for other in self.sent):
                    self.sent = [other for other in self.sent if other is not copy]
                    target, values = copy
                    target.copy_(values)

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
        replacements = {"Event": Event, "Stream": Stream, "stream": _stream}
        replacements["current_stream"] = current_stream
        for name, value in replacements.items():
            self._patch(torch.cuda, name, value)
        for owner, name in HOST_SEAMS:
            self._patch(owner, name, getattr(self.host, name))
        # torch.tensor then creates a tensor on the CPU and moves it.
        torch._C._set_only_lift_cpu_tensors(True)
        SimulatedGPU.active, self.stream = self, None
        self.stream = Stream()
        return super().__enter__()

    def __exit__(self, *raised):
        torch._C._set_only_lift_cpu_tensors(False)
        for owner, name, value in reversed(self._patches):
            setattr(owner, name, value)
        self._patches = []
        SimulatedGPU.active = None
        return super().__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {}, self)


class _OtherThread(TorchDispatchMode):
    """The simulated GPU in another thread."""

    def __init__(self, gpu: SimulatedGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {}, self._gpu)


def run(
    func: Any, args: Any, kwargs: dict[str, Any], gpu: SimulatedGPU | None = None
) -> Any:
    """Run one operation on the contents of its tensors."""
    if func in _PINNING:
        return args[0] if _PINNING[func] is None else _PINNING[func]
    kwargs = dict(kwargs)
    flat, _ = tree_flatten((args, kwargs))
    tensors = [t for t in flat if isinstance(t, torch.Tensor)]
    on_device = [t for t in tensors if isinstance(t, GpuTensor)]
    device = kwargs.get("device")
    on_gpu = bool(on_device)
    if device is not None:
        on_gpu = torch.device(device).type == "cuda"
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    if func not in _COPIES:
        _refuse_mixtures(func, tensors)
    if gpu is not None and _waits(func, args, kwargs, on_device, on_gpu):
        gpu.waits.append(_where(func))
    contents = tree_map(_numbers, (args, kwargs))
    late = func is aten.copy_.default and len(args) > 2 and args[2]
    if late and isinstance(args[1], GpuTensor) and not isinstance(args[0], GpuTensor):
        assert SimulatedGPU.active is not None
        SimulatedGPU.active.send(args[0], contents[0][1])
        return args[0]
    result = func(*contents[0], **contents[1])
    if func in _COPIES and device is None:
        on_gpu = isinstance(args[0], GpuTensor)
    owners = {id(_numbers(t)): t for t in on_device}
    return tree_map(lambda t: _wrapped(t, owners) if on_gpu else t, result)


def _numbers(tensor: Any) -> Any:
    return tensor.numbers if isinstance(tensor, GpuTensor) else tensor


def _wrapped(result: Any, owners: dict[int, GpuTensor]) -> Any:
    if not isinstance(result, torch.Tensor):
        return result
    return owners.get(id(result)) if id(result) in owners else GpuTensor.of(result)


def _refuse_mixtures(func: Any, tensors: list[torch.Tensor]) -> None:
    devices = {isinstance(t, GpuTensor) for t in tensors if t.dim()}
    if len(devices) > 1 and func not in _INDEXING:
        raise RuntimeError(f"{func} on tensors of two devices")


def _waits(
    func: Any, args: Any, kwargs: Any, on_device: list[Any], on_gpu: bool
) -> bool:
    """Whether the host would wait for this operation."""
    if func in _WAITS:
        return bool(on_device)
    if func in _INDEXING:
        indices = [i for i in args[1] if i is not None]
        foreign = any(not isinstance(i, GpuTensor) for i in indices)
        masks = any(i.dtype in (torch.bool, torch.uint8) for i in indices)
        return bool(on_device) and (foreign or masks)
    if func is aten._to_copy.default:
        crosses = isinstance(args[0], GpuTensor) != on_gpu
        return crosses and not kwargs.get("non_blocking")
    if func is aten.copy_.default:
        crosses = isinstance(args[0], GpuTensor) != isinstance(args[1], GpuTensor)
        return crosses and not (len(args) > 2 and args[2])
    return False


def _where(func: Any) -> str:
    """The operation and the line of the package that called it."""
    stack = traceback.extract_stack()
    frames = [frame for frame in stack if "vllm_kvplugins/" in frame.filename]
    last = frames[-1] if frames else None
    return f"{func}" + (f" at {last.filename}:{last.lineno}" if last else "")
