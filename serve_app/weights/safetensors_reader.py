"""Reads the tensors of a folder of safetensors as pieces, for the writer: nothing of torch, and no tensor whole.

The files are read, not mapped: a mapped file that its writer cuts short ends the process with a signal.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine import WeightsSourceError
from serve_app.weights.tensor_pieces import TensorPiece

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PIECE_BYTES = 2**24
MAX_HEADER_BYTES = 100_000_000
"""As the reference implementation has it."""


def read_tensors(folder: str) -> Iterator[tuple[str, Iterator[TensorPiece]]]:
    """Gives each tensor's name and then its pieces, to be taken before the next tensor. Raises WeightsSourceError."""
    try:
        for path in _files(Path(folder)):
            with path.open("rb", buffering=0) as file:
                yield from _read_file(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(folder, error) from error


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE_NAME).exists():
        return [folder / SINGLE_NAME]
    if (folder / INDEX_NAME).exists():
        names = set(json.loads((folder / INDEX_NAME).read_bytes())["weight_map"].values())
        return [folder / Path(name).name for name in sorted(names)]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"it holds no {SINGLE_NAME}")
    return found


def _read_file(file: Any) -> Iterator[tuple[str, Iterator[TensorPiece]]]:
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise ValueError(f"{file.name} is no safetensors file")
    header: dict[str, dict[str, Any]] = json.loads(os.pread(file.fileno(), length, 8))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        yield name, _read_pieces(file, name, entry, 8 + length)


def _read_pieces(file: Any, name: str, entry: dict[str, Any], data_start: int) -> Iterator[TensorPiece]:
    start, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    offset = 0
    while True:
        data = np.empty(min(PIECE_BYTES, end - start - offset), np.uint8)
        try:
            count = os.preadv(file.fileno(), [data.data], data_start + start + offset)
        except OSError as error:
            raise _unreadable(file.name, error) from error
        if count != data.size:
            raise _unreadable(file.name, f"it ends inside {name}")
        yield TensorPiece(name, entry["dtype"], shape, offset, data)
        offset += data.size
        if start + offset >= end:
            return


def _unreadable(name: str, reason: object) -> WeightsSourceError:
    return WeightsSourceError(f"{name} cannot be read any more: {reason}; send whole weights once")
