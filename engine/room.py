"""Memory for weights and caches: in large pages, and taken again once nobody holds what was in it.

A swap needs as much memory as the one before has just given back. Memory new to a process is cleared, page by page: of
small pages that is as much work as all the rest of staging, and where a host lends memory to a virtual machine page by
page, ten times as much.
"""

import ctypes
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

ARENA_BYTES = 64 * 2**20
"""Enough for tensors to lie in large pages, and little to be kept by one tensor of a set that is else gone."""
ALIGNMENT = 64
"""Of a tensor in bytes, as torch has it."""
PAGE_BYTES = 2 * 2**20
"""A large one."""
POPULATE_WRITE = 23
"""Linux's advice, from 5.14 on, to have pages now that can be written; Python has no name for it."""


class Room:
    """The memory of one owner's weights. Thread-safe.

    Memory whose tensors are all gone is kept for the next ones, and marked: the system takes it where memory is short,
    and counts it as available.
    """

    def __init__(self) -> None:
        """Takes nothing yet."""
        self._free: deque[mmap.mmap] = deque()
        """Appended to by whoever drops the last tensor of an arena, wherever it is: so without the lock."""
        self._lock = threading.Lock()

    def filling(self) -> "Filling":
        """Gives what makes the tensors of one set."""
        return Filling(self)

    def arena(self, num_bytes: int) -> Any:
        """Gives an array of bytes, of at least so many; it comes back when nobody holds a part of it."""
        memory = self._again(num_bytes) or _new(max(num_bytes, ARENA_BYTES))
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, _give_back, self._free, memory).atexit = False
        return array

    def _again(self, num_bytes: int) -> mmap.mmap | None:
        with self._lock:
            fitting = [memory for memory in tuple(self._free) if len(memory) >= num_bytes]
            if not fitting:
                return None
            found = min(fitting, key=len)
            self._free.remove(found)
            return found


class Filling:
    """Lays one tensor behind the other. One thread only."""

    def __init__(self, room: Room) -> None:
        """Takes nothing yet."""
        self._room = room
        self._arena: Any = np.empty(0, np.uint8)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Gives a tensor of any values, on the CPU, whose storage is its own."""
        num_bytes = prod(shape) * dtype.itemsize
        if self._used + num_bytes > len(self._arena):
            self._arena, self._used = self._room.arena(num_bytes), 0
        part = self._arena[self._used : self._used + num_bytes]
        self._used += num_bytes + -num_bytes % ALIGNMENT
        return torch.from_numpy(part).view(dtype).view(tuple(shape))


def populate(tensor: Tensor) -> None:
    """Has the system give the memory of a contiguous tensor on the CPU now, not at the first touch of each page.

    Keeps what is in it. Where the system cannot do that, nothing changes.
    """
    if sys.platform != "linux":
        return
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = tensor.data_ptr() + tensor.numel() * tensor.element_size() - first
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), POPULATE_WRITE)


def _new(num_bytes: int) -> mmap.mmap:
    size = num_bytes + -num_bytes % PAGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(memory, mmap.MADV_HUGEPAGE)
    return memory


def _give_back(free: deque[mmap.mmap], memory: mmap.mmap) -> None:
    _advise(memory, mmap.MADV_FREE)
    free.append(memory)


def _advise(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError:  # a kernel without it: then the memory is as any other
        return
