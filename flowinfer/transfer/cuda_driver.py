"""Device memory of another process, by the CUDA driver's own calls. Needs libcuda only, which comes with the driver.

All calls work in the current context of the thread: torch.cuda.set_device makes that of its device current.
"""

from __future__ import annotations

import ctypes
import functools
import threading

from flowinfer.errors import FlowInferError

LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: memory of another GPU of this host may be mapped too
HANDLE_BYTES = 64


class CudaError(FlowInferError):
    """A call of the driver failed; the message names it and the driver's reason."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"there is no CUDA driver here: {error}") from error
    lib.cuMemGetAddressRange_v2.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
    lib.cuIpcGetMemHandle.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    lib.cuIpcOpenMemHandle_v2.argtypes = (ctypes.c_void_p, _Handle, ctypes.c_uint)
    lib.cuIpcCloseMemHandle.argtypes = (ctypes.c_uint64,)
    lib.cuMemcpyDtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    lib.cuGetErrorString.argtypes = (ctypes.c_int, ctypes.c_void_p)
    return lib


def _call(name: str, *arguments: object) -> None:
    lib = _driver()
    if code := getattr(lib, name)(*arguments):
        text = ctypes.c_char_p()
        lib.cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(f"{name} failed: {(text.value or b'unknown error').decode()} ({code})")


def export(address: int) -> tuple[bytes, int]:
    """Names the allocation that holds this device address for other processes: (handle, offset of the address in it).

    A handle is of a whole cudaMalloc; the offset is what a caching allocator, as torch's, cut off before. Raises
    CudaError for memory that has no such handle, as that of expandable segments.
    """
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle.reserved), address - base.value


_open: dict[bytes, list[int]] = {}  # handle: [address, users]; a handle can be opened once in a process
_lock = threading.Lock()


def open_handle(handle: bytes) -> int:
    """Maps the allocation of another process; its address here. Seconds for the first one of a process."""
    with _lock:
        if handle not in _open:
            address = ctypes.c_uint64()
            named = _Handle.from_buffer_copy(handle)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), named, LAZY_PEER_ACCESS)
            _open[handle] = [address.value, 0]
        _open[handle][1] += 1
        return _open[handle][0]


def close_handle(handle: bytes) -> None:
    """Takes back one open_handle; the last one unmaps the memory. Nothing may read it any more."""
    with _lock:
        entry = _open[handle]
        entry[1] -= 1
        if not entry[1]:
            del _open[handle]
            _call("cuIpcCloseMemHandle", entry[0])


def copy_async(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Copies device memory on a stream (a cudaStream_t as a number)."""
    _call("cuMemcpyDtoDAsync_v2", target, source, num_bytes, stream)
