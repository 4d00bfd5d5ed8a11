"""Named tensors as plain bytes, in pieces small enough to travel: what a trainer sends and the store writes.

A piece carries the type by its name in safetensors (https://github.com/huggingface/safetensors) and the bytes as a
numpy array, which Ray hands on without a copy; of torch it does so for no tensor, and numpy has no bfloat16.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine import STORED_DTYPES, InvalidRequest

_DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""A state dict, or what `named_parameters()` gives."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Bytes of one tensor, from `offset` on; shape and dtype are those of the whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    data: npt.NDArray[np.uint8]

    @property
    def whole_bytes(self) -> int:
        """Size of the tensor that this is a piece of."""
        return prod(self.shape) * STORED_DTYPES[self.dtype].itemsize


def cut_buckets(named_tensors: NamedTensors, *, bucket_bytes: int) -> Iterator[list[TensorPiece]]:
    """Gives the tensors, in their order, as buckets of at most `bucket_bytes`; a longer tensor goes over several.

    Pieces are views where the tensor is contiguous and on the CPU, else of a copy of this one tensor. Raises
    InvalidRequest, which names the tensor, for one whose bytes do not make it whole.
    """
    bucket: list[TensorPiece] = []
    room = bucket_bytes
    for name, tensor in named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors:
        dtype, data = _bytes_of(name, tensor)
        offset = 0
        while True:
            piece = data[offset : offset + room]
            bucket.append(TensorPiece(name, dtype, tuple(tensor.shape), offset, piece))
            offset, room = offset + piece.size, room - piece.size
            if room == 0:
                yield bucket
                bucket, room = [], bucket_bytes
            if offset == data.size:
                break
    if bucket:
        yield bucket


def _bytes_of(name: str, tensor: Tensor) -> tuple[str, npt.NDArray[np.uint8]]:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise InvalidRequest(f"{name!r} is {type(tensor).__name__}; give names and tensors", "named_tensors")
    if isinstance(tensor, DTensor):
        raise InvalidRequest(f"{name} is cut over ranks; give its full_tensor()", "named_tensors")
    if tensor.dtype not in _DTYPE_NAMES or tensor.layout is not torch.strided or tensor.is_meta:
        raise InvalidRequest(
            f"{name} is {tensor.dtype} ({tensor.layout}, on {tensor.device}); only dense tensors of "
            f"{', '.join(_DTYPE_NAMES.values())} can be sent",
            "named_tensors",
        )
    # A conjugate or negative view has other bytes than it shows; `contiguous` alone leaves it.
    whole = tensor.detach().to("cpu").resolve_neg().contiguous()
    data: npt.NDArray[np.uint8] = whole.reshape(-1).view(torch.uint8).numpy()
    return _DTYPE_NAMES[tensor.dtype], data
