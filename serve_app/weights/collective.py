"""A process group of two, a trainer (rank 0) and a receiver (rank 1), over which buckets of tensors are broadcast.

It is made from a store and a backend of torch.distributed alone, so neither side needs a default group, and the one
that a trainer has stays as it is. What a bucket holds goes another way, beforehand: the group carries bytes only.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from engine import InvalidRequest, WeightsSourceError
from serve_app.weights.tensor_pieces import TensorPiece

_C10D: Any = torch.distributed
"""Of what its C++ part brings, the stubs know only some."""
BACKENDS = ("gloo", "nccl")
TRAINER, RECEIVER = 0, 1
_RANKS = 2


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the two find each other: the trainer's address. timeout_s: of meeting and of each broadcast."""

    host: str
    port: int
    backend: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class PieceHeader:
    """A piece without its bytes, of which there are num_bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class PairGroup:
    """One side of the group. Blocks; raises WeightsSourceError where the other side is gone or too slow."""

    def __init__(self, meeting: Meeting, store: Any, rank: int) -> None:
        """Waits for the other side."""
        self._timeout_s = meeting.timeout_s
        self._device = torch.device("cuda" if meeting.backend == "nccl" else "cpu")
        try:
            self._group: Any = _make_group(meeting, _C10D.PrefixStore("pitstop", store), rank)
        except RuntimeError as error:
            raise self._failure(error) from error

    def broadcast(self, data: Tensor) -> Tensor:
        """Gives the bytes of the trainer's `data` on both sides, on the CPU; the receiver's is filled."""
        try:
            moved = data.to(self._device)
            options = _C10D.BroadcastOptions()
            options.rootRank = TRAINER
            options.rootTensor = 0
            self._group.broadcast([moved], options).wait(timedelta(seconds=self._timeout_s))
            return moved.cpu()
        except RuntimeError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Leaves the group, and so ends what the other side waits for."""
        self._group = None

    def _failure(self, error: RuntimeError) -> WeightsSourceError:
        return WeightsSourceError(
            f"the other side of the process group is gone or did not answer in {self._timeout_s:g} s ({error}); "
            "swap again"
        )


def check_backend(backend: str) -> None:
    """Raises InvalidRequest for a backend that this process has not got."""
    if backend not in BACKENDS:
        raise InvalidRequest(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}", "backend")
    if backend == "nccl" and not (torch.cuda.is_available() and _C10D.is_nccl_available()):
        raise InvalidRequest("backend is 'nccl', and this process has no CUDA device; use 'gloo'", "backend")


def open_store(meeting: Meeting, *, is_master: bool) -> Any:
    """Gives the store over which the two meet; the trainer's is the master, and takes port 0 for any that is free."""
    timeout = timedelta(seconds=meeting.timeout_s)
    try:
        return _C10D.TCPStore(
            meeting.host, meeting.port, _RANKS, is_master=is_master, timeout=timeout, wait_for_workers=False
        )
    except RuntimeError as error:
        raise WeightsSourceError(f"no process group at {meeting.host}:{meeting.port}: {error}") from error


def pack(bucket: Sequence[TensorPiece]) -> tuple[list[PieceHeader], Tensor]:
    """Gives what a bucket holds, and its bytes in one tensor."""
    headers = [PieceHeader(piece.name, piece.dtype, piece.shape, piece.offset, piece.data.size) for piece in bucket]
    return headers, torch.from_numpy(np.concatenate([piece.data for piece in bucket]))


def unpack(headers: Sequence[PieceHeader], data: Tensor) -> list[TensorPiece]:
    """Gives the bucket again; its pieces are views of `data`."""
    whole = data.numpy()
    ends = np.cumsum([header.num_bytes for header in headers]).tolist()
    return [
        TensorPiece(header.name, header.dtype, header.shape, header.offset, whole[end - header.num_bytes : end])
        for header, end in zip(headers, ends, strict=True)
    ]


def _make_group(meeting: Meeting, store: Any, rank: int) -> Any:
    timeout = timedelta(seconds=meeting.timeout_s)
    if meeting.backend == "nccl":
        nccl = _C10D.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return _C10D.ProcessGroupNCCL(store, rank, _RANKS, nccl)
    options = _C10D.ProcessGroupGloo._Options()
    # By address: the name of a machine often leads to loopback, or nowhere.
    options._devices = [_C10D.ProcessGroupGloo.create_device(hostname=_own_address(meeting))]
    options._timeout = timeout
    return _C10D.ProcessGroupGloo(store, rank, _RANKS, options)


def _own_address(meeting: Meeting) -> str:
    """Gives this machine's address on the way to the trainer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing; it only chooses the way.
        probe.connect((meeting.host, meeting.port or 1))
        address: str = probe.getsockname()[0]
        return address
