"""Freed memory of a session: kept for its next cell, which is quicker, up to a limit."""

import ctypes
from typing import Any

_IDLE = 64 << 20  # bytes that an idle session may keep


class _Heap(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "o", "s", "h", "hd", "us", "fs", "used", "free", "keep")]


def _heap_functions() -> tuple[Any, Any] | None:
    libc = ctypes.CDLL(None)
    try:
        info, trim = libc.mallinfo2, libc.malloc_trim
    except AttributeError:  # before glibc 2.33, or another C library
        return None
    info.restype, trim.argtypes = _Heap, [ctypes.c_size_t]
    return info, trim


_heap = _heap_functions()


def give_back() -> None:
    """Freed memory stays with the process (profiles.py), which is quicker; between cells that has a limit."""
    if _heap is not None and _heap[0]().free > _IDLE:
        _heap[1](0)
