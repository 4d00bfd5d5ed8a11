"""Keeps the threads of OpenMP, which torch computes with on a CPU, to those that generate.

Each thread that computes gets helpers of its own, which stay when it is done. GNU's library counts them all, and where
there are more than cores it puts helpers to sleep between two operations instead of letting them wait awake: waking
them costs some 50 us, several hundred times a step. So whoever computes beside the generation thread, once and not
step after step, gives its helpers back.
"""

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOFT = 1
"""omp_pause_soft: what was set stays as it is."""


def release_helpers() -> None:
    """Ends the helpers of the calling thread; its next parallel operation makes new ones. Cheap where it has none."""
    for library in _libraries():
        library.omp_pause_resource_all(SOFT)


@contextmanager
def alone() -> Iterator[None]:
    """Inside, the calling thread computes without helpers; other threads keep theirs.

    Beside generation a helper would have to wait for a core at every operation, and who waits for it with it.
    """
    before = torch.get_num_threads()  # which also sets the thread up: later, torch would overwrite the 1
    libraries = _libraries()
    for library in libraries:
        library.omp_set_num_threads(1)
    try:
        yield
    finally:
        for library in libraries:
            library.omp_set_num_threads(before)


@cache
def _libraries() -> list[Any]:
    """Gives GNU's OpenMP as this process has loaded it, by whatever name; another OpenMP does not count like this."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = sorted(set(re.findall(r"/\S*libgomp[^/\s]*\.so\S*", maps.read_text())))
    found = [ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD) for path in paths]
    return [library for library in found if hasattr(library, "omp_pause_resource_all")]  # since OpenMP 5.0
