"""Reads the tensors of a folder of safetensors files.

The files are read, not mapped: a mapped file that its writer cuts short ends the process with a signal. Format:
https://github.com/huggingface/safetensors (8 bytes of header length, a JSON header, the tensors without gaps).
"""

import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import WeightsSourceError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
"""As the reference implementation has it."""
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the name of the type in a safetensors file."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies; readable while its folder is open. `start` and `size_bytes` count bytes of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: FileIO
    start: int
    size_bytes: int

    def read(self) -> Tensor:
        """Gives the tensor in memory of its own, on the CPU. Raises WeightsSourceError when the file ends before it."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self._read_into(tensor.reshape(-1), self.start)
        return tensor

    def read_chunks(self, out: Tensor, num_values: int) -> Iterator[Tensor]:
        """Reads into a contiguous tensor of as many values, cast to its type; gives each part when it is there."""
        flat = out.view(-1)
        stored = None if out.dtype == self.dtype else torch.empty(min(num_values, len(flat)), dtype=self.dtype)
        for first in range(0, len(flat), num_values):
            part = flat[first : first + num_values]
            raw = part if stored is None else stored[: len(part)]
            self._read_into(raw, self.start + first * self.dtype.itemsize)
            if stored is not None:
                part.copy_(raw)
            yield part

    def _read_into(self, values: Tensor, position: int) -> None:
        buffer = values.view(torch.uint8).numpy().data
        while buffer:
            count = os.preadv(self.file.fileno(), [buffer], position)
            if count == 0:
                raise WeightsSourceError(f"{self.file.name} ends inside tensor {self.name}")
            buffer, position = buffer[count:], position + count


def files_behind(tensors: Iterable[StoredTensor]) -> str:
    """Gives names, sizes and times of the files that hold the tensors; the same where two have read the same."""
    files = {tensor.file.name: tensor.file for tensor in tensors}
    return " ".join(f"{Path(name).name}:{_fingerprint(file)}" for name, file in sorted(files.items()))


@contextmanager
def open_folder(path: str) -> Iterator[dict[str, StoredTensor]]:
    """Gives every tensor of the folder (or single file) by its name in the checkpoint.

    Raises WeightsSourceError, which names the file, when one is missing, damaged, or written to before the context
    ends.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(_open(file)) for file in _found_files(path)]
        before = [_fingerprint(file) for file in files]
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            for tensor in _read_header(file):
                if tensor.name in tensors:
                    raise WeightsSourceError(
                        f"{file.name} holds {tensor.name}, as does {tensors[tensor.name].file.name}"
                    )
                tensors[tensor.name] = tensor
        yield tensors
        for file, fingerprint in zip(files, before, strict=True):
            if _fingerprint(file) != fingerprint:
                raise WeightsSourceError(
                    f"{file.name} was changed while it was read; stage it again when it is complete"
                )


def _found_files(path: str) -> list[Path]:
    try:
        return _weight_files(Path(path))
    except OSError as error:
        # A name too long, a folder that may not be entered: as much the caller's to mend as one that is missing.
        raise WeightsSourceError(f"{path} cannot be read: {error.strerror}") from error


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise WeightsSourceError(f"there is no folder {path}")
    if (path / SINGLE_FILE).exists():
        return [path / SINGLE_FILE]
    if (path / INDEX_FILE).exists():
        return _indexed_files(path / INDEX_FILE)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise WeightsSourceError(f"{path} holds no *.safetensors file")
    return files


def _indexed_files(index: Path) -> list[Path]:
    with _open(index) as file:
        content = file.readall()
    try:
        names = sorted(set(json.loads(content)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsSourceError(f"{index} is not an index of safetensors files: {error!r}") from error
    for name in names:
        if Path(name).name != name:
            raise WeightsSourceError(f"{index} names {name!r}, which is not in its folder")
    return [index.parent / name for name in names]


def _open(path: Path) -> FileIO:
    """Gives a regular file, open; whatever else has that name might never answer a read."""
    try:
        file = FileIO(path, "rb", opener=_open_at_once)
    except OSError as error:
        raise WeightsSourceError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise WeightsSourceError(f"{path} is not a regular file; weights are read from files alone")
    return file


def _open_at_once(path: str, flags: int) -> int:
    # A named pipe would have its reader wait for a writer, who may never come.
    return os.open(path, flags | os.O_NONBLOCK)


def _fingerprint(file: FileIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _read_header(file: FileIO) -> list[StoredTensor]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little") if size >= 8 else 0
    if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
        raise WeightsSourceError(f"{file.name} is not a safetensors file, or was cut short")
    start = 8 + length
    try:
        header: dict[str, dict[str, Any]] = json.loads(_read_all(file, length))
        header.pop("__metadata__", None)
        tensors = [_parse_entry(name, entry, file, start) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsSourceError(f"{file.name} has a damaged header: {error!r}") from error
    end = start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.size_bytes)):
        if tensor.start != end:
            raise WeightsSourceError(
                f"{file.name} has a damaged header: {tensor.name} does not follow the tensor before it"
            )
        end += tensor.size_bytes
    if end != size:
        raise WeightsSourceError(
            f"{file.name} has {size} bytes where its header says {end}; it was cut short or written over"
        )
    return tensors


def _read_all(file: FileIO, length: int) -> bytes:
    parts = []
    while length and (part := file.read(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _parse_entry(name: str, entry: dict[str, Any], file: FileIO, start: int) -> StoredTensor:
    if entry["dtype"] not in STORED_DTYPES:
        raise WeightsSourceError(f"{file.name} holds {name} as {entry['dtype']}, which cannot be read")
    dtype, shape = STORED_DTYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"])
    first, end = (int(offset) for offset in entry["data_offsets"])
    if min(shape, default=0) < 0 or end - first != prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} has {end - first} bytes for shape {list(shape)}")
    return StoredTensor(name, dtype, shape, file, start + first, end - first)
