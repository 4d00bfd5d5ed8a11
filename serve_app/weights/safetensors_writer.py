"""Writes safetensors files piece by piece, without ever holding a tensor.

A file begins with its header, which is known only at the end; so room for it is left, and filled up with the spaces
that the format allows. Format: https://github.com/huggingface/safetensors.
"""

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine import STORED_DTYPES, InvalidRequest, WeightsInvalid
from serve_app.weights.tensor_pieces import TensorPiece

HEADER_BYTES = 128 * 1024
"""Room for the header of a file: some thousand tensors."""
SHARD_BYTES = 5 * 10**9
"""After which a tensor begins a new file; as `save_pretrained` has it."""
MAX_NAME_LENGTH = 1024
COMPARED_BYTES = 2**22
DATA_START = 8 + HEADER_BYTES


@dataclass(slots=True)
class _Place:
    """Where a tensor lies and how much of it is there. `start` counts from the end of the header."""

    shard: int
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int
    num_written: int = 0

    def entry(self) -> dict[str, object]:
        end = self.start + self.size_bytes
        return {"dtype": self.dtype, "shape": list(self.shape), "data_offsets": [self.start, end]}


class SafetensorsWriter:
    """The files of one folder. Raises OSError as the disk does; afterwards only `close` may be called."""

    def __init__(self, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._places: dict[str, _Place] = {}
        self._files: list[int] = []
        self._shard_end = 0
        self._header_end = 0
        self._open_name: str | None = None
        self.size_bytes = 0

    @property
    def names(self) -> Collection[str]:
        return self._places.keys()

    def append(self, piece: TensorPiece) -> None:
        """Writes a piece, or compares it with what came under its name before. Raises WeightsInvalid."""
        place = self._places.get(piece.name)
        if place is None:
            place = self._begin(piece)
        elif (place.dtype, place.shape) != (piece.dtype, piece.shape):
            raise _different(piece.name)
        if piece.offset < place.num_written or place.num_written == place.size_bytes:
            self._compare(place, piece)
            return
        self._check_order(piece, place)
        _write_all(self._files[place.shard], piece.data, DATA_START + place.start + piece.offset)
        place.num_written += piece.data.size
        self.size_bytes += piece.data.size
        self._open_name = None if place.num_written == place.size_bytes else piece.name

    def finish(self) -> dict[str, str]:
        """Completes and closes the files, durably; gives the file of each tensor, or nothing where there is one file.

        Raises InvalidRequest where a tensor is not whole, or there is none.
        """
        if not self._places:
            raise InvalidRequest("no tensor was sent", "named_tensors")
        self._check_whole()
        for shard, file in enumerate(self._files):
            entries = {name: place.entry() for name, place in self._places.items() if place.shard == shard}
            header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode().ljust(HEADER_BYTES)
            _write_all(file, np.frombuffer(HEADER_BYTES.to_bytes(8, "little") + header, np.uint8), 0)
            os.fsync(file)
            self._path(shard).rename(self._folder / self._final_name(shard))
        is_single = len(self._files) == 1
        self.close()
        return {} if is_single else {name: self._final_name(place.shard) for name, place in self._places.items()}

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _begin(self, piece: TensorPiece) -> _Place:
        self._check_whole()
        _check_described(piece)
        # What a JSON string, the offsets and the marks between them take at most.
        entry_bytes = 6 * len(piece.name) + 22 * len(piece.shape) + 128
        is_full = self._shard_end + piece.whole_bytes > self._shard_bytes and self._shard_end > 0
        if not self._files or is_full or self._header_end + entry_bytes > HEADER_BYTES - 64:
            self._files.append(os.open(self._path(len(self._files)), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
            self._shard_end = self._header_end = 0
        place = _Place(len(self._files) - 1, piece.dtype, piece.shape, self._shard_end, piece.whole_bytes)
        self._places[piece.name] = place
        self._shard_end += piece.whole_bytes
        self._header_end += entry_bytes
        return place

    def _check_whole(self) -> None:
        if self._open_name is not None:
            place = self._places[self._open_name]
            raise InvalidRequest(
                f"{self._open_name} has {place.size_bytes} bytes and only {place.num_written} were sent", "pieces"
            )

    def _check_order(self, piece: TensorPiece, place: _Place) -> None:
        end = piece.offset + piece.data.size
        if piece.offset != place.num_written or end > place.size_bytes:
            raise InvalidRequest(
                f"bytes {piece.offset} to {end} of {piece.name} came where byte {place.num_written} of "
                f"{place.size_bytes} is next",
                "pieces",
            )

    def _compare(self, place: _Place, piece: TensorPiece) -> None:
        position = DATA_START + place.start + piece.offset
        if piece.offset + piece.data.size > place.num_written:
            raise _different(piece.name)
        for first in range(0, piece.data.size, COMPARED_BYTES):
            part = piece.data[first : first + COMPARED_BYTES]
            if os.pread(self._files[place.shard], part.size, position + first) != part.tobytes():
                raise _different(piece.name)

    def _path(self, shard: int) -> Path:
        return self._folder / f"{shard:05d}"

    def _final_name(self, shard: int) -> str:
        count = max(place.shard for place in self._places.values()) + 1
        return "model.safetensors" if count == 1 else f"model-{shard + 1:05d}-of-{count:05d}.safetensors"


def _check_described(piece: TensorPiece) -> None:
    if piece.dtype not in STORED_DTYPES:
        raise InvalidRequest(f"{piece.name} is of type {piece.dtype!r}, which is not known", "pieces")
    is_name = 0 < len(piece.name) <= MAX_NAME_LENGTH and piece.name != "__metadata__"
    if not is_name or min(piece.shape, default=0) < 0:
        raise InvalidRequest(f"{piece.name[:80]!r} of shape {list(piece.shape)} cannot be a tensor's", "pieces")


def _different(name: str) -> WeightsInvalid:
    return WeightsInvalid(f"{name} was sent twice with different content; send each tensor once", tensor=name)


def _write_all(file: int, data: npt.NDArray[np.uint8], position: int) -> None:
    left = data.data
    while left:
        count = os.pwrite(file, left, position)
        left, position = left[count:], position + count
