"""A module shaped like `cupy` over NumPy, to run the code around a GPU where there is none. It is no GPU.

Work on arrays is queued on the streams of `fake_streams.py`; kernels are the CUDA C texts, run by the emulator; NCCL is
in `fake_nccl.py`. Ignored on purpose: all of CuPy that hetu does not call. It was written from CuPy's documentation.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from .fake_streams import HERE, LOCK, LOG, CUDARuntimeError, Event, Item, Stream, current, stack, stream_at

MEMORY: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # of the device, by address


def holding(pointer: int, nbytes: int = 1) -> list[Any]:
    """The arrays of the device that have these bytes, while other threads make some and drop some."""
    before = [(r.key, r()) for r in MEMORY.valuerefs() if r.key <= pointer]
    return [a for address, a in before if a is not None and pointer + nbytes <= address + a.nbytes]


# -- arrays ------------------------------------------------------------------------------------------------------------


class Array(np.ndarray):
    """An array "on the device". Work on it is queued; reading it on the host waits for the queue."""

    __cuda_array_interface__ = property(lambda self: {})
    data = property(lambda self: Pointer(self))
    device = property(lambda self: types.SimpleNamespace(id=0))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        refuse_host(inputs)
        refuse_product(ufunc, inputs)
        return queued(getattr(ufunc, method), inputs, options, out and out[0])

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        if function is np.copyto:
            return queued(function, arguments, options, arguments[0], first=True)
        if function in (np.shares_memory, np.may_share_memory):
            return function(*map(plain, arguments))
        if function in (np.empty, np.zeros, np.ones):
            return getattr(MODULE, function.__name__)(*arguments, **options)
        refuse_product(function, arguments)
        if function in (np.concatenate, np.stack) and len(arguments[0]) > 8 and current().capturing is not None:
            HERE.__dict__.get("pinned", lambda _: None)(1)  # it copies their addresses
        options = dict(options)
        return queued(function, arguments, options, options.pop("out", None))

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(k, np.ndarray | list) for k in keys):
            return queued(np.ndarray.__getitem__, (self, key), {}, None)
        found = plain(self).__getitem__((*keys, ...) if ... not in keys else key)
        return found.view(Array)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(value, Array):
            value = np.array(value)
        add(lambda: plain(self).__setitem__(key, plain(value)))

    def get(self) -> np.ndarray:
        return self.read()

    def set(self, array: np.ndarray, stream: Stream | None = None) -> None:
        assert array.dtype == self.dtype and array.shape == self.shape and array.flags.c_contiguous
        stream = stream or current()
        stream.refuse_capture()
        pinned = is_pinned(array)
        array = array if pinned else array.copy()
        LOG.append("copy pinned" if pinned else "copy pageable")
        target, source = plain(self), plain(array)
        stream.add(Item(lambda: np.copyto(target, source)))

    def read(self) -> np.ndarray:
        LOG.append("get")
        current().synchronize()
        return plain(self).copy()

    def fill(self, value: Any) -> None:
        add(lambda: plain(self).fill(value))

    def copy(self, order: str = "C") -> Any:
        return queued(np.array, (self,), {"order": order}, None)

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> Any:
        return queued(np.ndarray.astype, (self, dtype), {"order": order}, None)

    def sort(self, axis: int = -1) -> None:
        if not self.flags.c_contiguous:
            raise NotImplementedError("Sorting non-contiguous array is not supported.")
        add(lambda: plain(self).sort(axis, kind="stable"))

    def tolist(self) -> Any:
        return self.read().tolist()

    item = lambda self: self.read().item()  # noqa: E731
    __float__ = __int__ = __bool__ = lambda self: type(self.read().item())(self.read().item())


def _method(name: str) -> Any:
    return lambda self, *arguments, **options: queued(getattr(np.ndarray, name), (self, *arguments), options, None)


for _name in "sum max min mean any all argmax argmin nonzero cumsum cumprod prod take".split():
    setattr(Array, _name, _method(_name))


class Pointer:
    """Where an array lies on the device."""

    def __init__(self, array: Array) -> None:
        self.ptr, self.owner = array.ctypes.data, array


def memcpy_async(target: int, source: int, nbytes: int, kind: str, stream: int) -> None:
    """CuPy lets this pass while a stream is captured, and nothing else that copies between host and device."""
    LOG.append(f"copy {kind}")
    stream_at(stream).add(Item(lambda: ctypes.memmove(target, source, nbytes) and None))


class PinnedMemory(bytearray):
    """Host memory that the device reads by itself, whenever it comes to it."""


def refuse_host(arguments: Any) -> None:
    """CuPy converts no arrays of the host by itself."""
    if any(isinstance(a, np.ndarray) and not isinstance(a, Array) and a.ndim for a in arguments):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")


PRODUCTS = (np.matmul, np.dot, np.vdot, np.tensordot, np.einsum)


def refuse_product(function: Any, arguments: Any) -> None:
    """CuPy's own calls of cuBLAS."""
    arrays = [a for a in arguments if isinstance(a, np.ndarray)]
    if function not in PRODUCTS or not any("float" in a.dtype.name for a in arrays):
        return
    if current().capturing is not None:
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
    if any(a.dtype.name == "bfloat16" and a.ndim > 2 for a in arrays):
        raise TypeError("data type 'E' not understood")


def is_pinned(array: Any) -> bool:
    while isinstance(array, np.ndarray | memoryview):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return isinstance(array, PinnedMemory)


def plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(plain(v) for v in value)
    return value.view(np.ndarray) if isinstance(value, Array) else value


def add(work: Callable[[], None]) -> None:
    current().add(Item(work))


def queued(function: Any, arguments: Any, options: dict, out: Any, first: bool = False) -> Any:
    """Queue work with a known place for its result; else run it now or, while capturing, make a place by running it."""
    arguments, options = plain(tuple(arguments)), plain(options)
    if first:
        return add(lambda: function(*arguments, **options))
    if out is not None:
        target = plain(out)
        add(lambda: function(*arguments, **options, out=target))
        return out
    if current().capturing is None:
        current().synchronize()
    result = function(*arguments, **options)
    if isinstance(result, np.ndarray) and any(
        isinstance(a, np.ndarray) and np.may_share_memory(a, result) for a in arguments
    ):
        return result.view(Array)
    result = on_device(result)
    if current().capturing is None:
        return result
    for part in result if isinstance(result, tuple) else (result,):
        if isinstance(part, Array):
            HERE.allocated += HERE.__dict__.get("pool") is None
    add(lambda: _assign(plain(result), function(*arguments, **options)))
    return result


def _assign(places: Any, values: Any) -> None:
    for place, value in zip(places, values) if isinstance(places, tuple) else ((places, values),):
        np.copyto(place, value)


def on_device(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(on_device, value))
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "biufcV":
            return value
        owner = np.array(value, order="K")
        MEMORY[owner.ctypes.data] = owner
        return owner.view(Array)
    return value


# -- the module --------------------------------------------------------------------------------------------------------


class Module(types.ModuleType):
    """NumPy's functions, whose results are on the device."""

    def __getattr__(self, name: str) -> Any:
        if name in ("asarray", "array", "ascontiguousarray"):  # NumPy does not pass these on
            found = _contiguous if name == "ascontiguousarray" else _converted
        else:
            found = getattr(np, name)
        if isinstance(found, type | np.dtype) or not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            flat = [*arguments, *options.values()]
            flat += [v for a in flat if isinstance(a, tuple | list) for v in a]
            if found is not _converted:
                refuse_host(flat)
            if any(isinstance(a, Array) for a in flat):
                return found(*arguments, **options)
            if current().capturing is not None and any(isinstance(a, np.ndarray) and a.ndim for a in flat):
                HERE.__dict__.get("pinned", lambda _: None)(1)
                return np.full_like(found(*arguments, **options), -77).view(Array)  # the staging memory is gone by then
            if current().capturing is not None:
                HERE.allocated += HERE.__dict__.get("pool") is None
            return on_device(found(*arguments, **options))

        call.__name__ = name
        if isinstance(found, np.ufunc):
            call.at = lambda target, places, values: _scattered(found, target, places, values)  # type: ignore
        return call


ATOMIC = "int32 uint32 uint64 float16 float32 float64 complex64 complex128".split()  # that CUDA adds at places


def _scattered(ufunc: np.ufunc, target: Any, places: Any, values: Any) -> None:
    refuse_host([target, places, values])
    if target.dtype.name not in ATOMIC:
        raise TypeError(f"{ufunc.__name__}.at only supports {', '.join(ATOMIC)} as data type, {target.dtype} is given")
    where, what = plain((target, places)), plain(values)
    add(lambda: ufunc.at(*where, what))


def _converted(value: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    if isinstance(value, Array):
        return value if dtype is None or value.dtype == dtype else value.astype(dtype)
    if isinstance(value, list | tuple) and any(isinstance(v, Array) for v in value):
        return np.stack(value)
    return np.array(value, dtype)


def _contiguous(value: Any) -> Any:
    return value if value.flags.c_contiguous else value.copy()


class RawModule:
    texts: ClassVar[dict[str, None]] = {}  # compiled together when the first kernel is launched

    def __init__(self, code: str, options: tuple[str, ...]) -> None:
        self.texts[code], self.code = None, code

    def get_function(self, name: str) -> Callable[..., None]:
        from hetu.gpu_kernels.emulator import Emulator, prepare

        kernel: list[Any] = []

        def launch(grid: Any, block: Any, arguments: Any, shared_mem: int = 0) -> None:
            with LOCK:  # the emulator is made for one thread
                if not kernel:
                    prepare(self.texts)
                    kernel.append(Emulator(["ascending"]).kernel(self.code, name))
            LOG.append(f"kernel {name}")
            given = plain(tuple(arguments))
            add(lambda: kernel[0](grid, block, given, shared_mem=shared_mem))

        launch.code, launch.name = self.code, name
        return launch


class MemoryPool:
    def malloc(self, nbytes: int) -> None:
        raise AssertionError("memory of NumPy comes from NumPy")


@contextlib.contextmanager
def using_allocator(allocator: Any) -> Iterator[None]:
    before, HERE.pool = HERE.__dict__.get("pool"), allocator
    try:
        yield
    finally:
        HERE.pool = before


MODULE = Module("cupy")
MODULE.ndarray, MODULE.RawModule, MODULE.is_available = Array, RawModule, lambda: True
nccl = types.ModuleType("cupy.cuda.nccl")  # filled by `fake_nccl.py`
cuda = types.ModuleType("cupy.cuda")
vars(cuda).update(
    Stream=Stream, Event=Event, get_current_stream=current, MemoryPool=MemoryPool, using_allocator=using_allocator,
    alloc_pinned_memory=PinnedMemory, nccl=nccl, CUDARuntimeError=CUDARuntimeError,
    set_pinned_memory_allocator=lambda allocator: setattr(HERE, "pinned", allocator),
    device=types.SimpleNamespace(get_cublas_handle=threading.get_ident),
    Device=lambda index: types.SimpleNamespace(
        use=lambda: None, id=index, pci_bus_id=str(threading.get_ident()), compute_capability="90"
    ),
    get_elapsed_time=lambda begin, end: 1.0,
    runtime=types.SimpleNamespace(
        getDevice=lambda: 0, getDeviceCount=lambda: 1, deviceSynchronize=lambda: stack()[0].synchronize(),
        getDeviceProperties=lambda index: {"name": b"a stand-in", "totalGlobalMem": 4 << 30},
        driverGetVersion=lambda: 0, CUDARuntimeError=CUDARuntimeError,
        memcpyAsync=memcpy_async, memcpyDeviceToHost="out", memcpyHostToDevice="in",
    ),
)  # fmt: skip
MODULE.cuda = cuda
MODULE.get_default_pinned_memory_pool = lambda: types.SimpleNamespace(malloc=lambda nbytes: None)
MODULE.get_default_memory_pool = lambda: types.SimpleNamespace(free_all_blocks=lambda: None)
MODULES = {"cupy": MODULE, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}


@contextlib.contextmanager
def installed() -> Iterator[types.ModuleType]:
    """Inside, `import cupy` gives this module."""
    from hetu.gpu_kernels import device, products

    from . import fake_cublas, fake_nccl  # noqa: F401 - the latter fills the module nccl

    before = {name: sys.modules.get(name) for name in MODULES}
    sys.modules.update(MODULES)
    device.gpu.cache_clear()
    LOG.clear()
    cublas, products.cublas = products.cublas, lambda cupy: fake_cublas.call
    try:
        yield MODULE
    finally:
        products.cublas = cublas
        products._workspaces.clear()
        device.gpu.cache_clear()
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
