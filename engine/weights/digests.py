"""Names for the values of tensors, so that processes can compare weights without exchanging them.

They tell damaged, truncated and mixed-up weights, and are not meant against somebody who forges them. XXH3 gives 128
bits at the speed of memory, some fifteen times as fast as SHA-256 with the processor's instructions for it: staging
reads at 0.3 GB/s and more beside generation, and SHA-256 would have taken most of the core that it may use.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import xxhash
from torch import Tensor


@dataclass(frozen=True)
class Contents:
    """What a set of weights holds.

    digests: of every parameter, by its name in the model's state dict, as it is served; tied names share one.
    unchanged: the parameters that keep the values they have. num_bytes: how much was read.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    unchanged: tuple[str, ...] = ()
    num_bytes: int = 0

    @cached_property
    def digest(self) -> str:
        """One digest over all of them."""
        return digest_of_all(self.digests)


CHUNK_BYTES = 2**20
"""Of values that are looked at twice: it fits the second level of the processor's cache, where that costs a fifth."""


class Scan:
    """Takes the values of one tensor in their order: gives its digest, and whether all of them are finite."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Takes no values yet."""
        self._hasher = _hasher_of(shape, dtype)
        self.is_finite = True

    @property
    def digest(self) -> str:
        """As `digest_of` gives it, when all were taken."""
        return self._hasher.hexdigest()

    def add(self, values: Tensor) -> None:
        """Takes the next ones: contiguous, of one dimension, on the CPU."""
        _update(self._hasher, values)
        self.is_finite = self.is_finite and _is_finite(values)


def scan(tensor: Tensor) -> Scan:
    """Scans a whole tensor."""
    found = Scan(tensor.shape, tensor.dtype)
    plain, num_values = _plain(tensor), CHUNK_BYTES // tensor.dtype.itemsize
    for first in range(0, len(plain), num_values):
        found.add(plain[first : first + num_values])
    return found


def digest_of(tensor: Tensor) -> str:
    """Gives 32 hex digits over a tensor's type, shape and bytes."""
    hasher = _hasher_of(tensor.shape, tensor.dtype)
    _update(hasher, _plain(tensor))
    return hasher.hexdigest()


def digest_of_all(digests: Mapping[str, str]) -> str:
    """Gives one digest over those of all parameters, in the order of their names."""
    return xxhash.xxh3_128("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def digests_of_ranks(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Gives one digest a parameter from those of its parts, in the order of the ranks; the common one where all hold
    the same.
    """
    first, *others = parts
    return {name: _joined([digest, *(other[name] for other in others)]) for name, digest in first.items()}


def _joined(digests: list[str]) -> str:
    return digests[0] if len(set(digests)) == 1 else xxhash.xxh3_128(" ".join(digests).encode()).hexdigest()


def _hasher_of(shape: Sequence[int], dtype: torch.dtype) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(f"{dtype} {list(shape)} ".encode())


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1)


def _update(hasher: xxhash.xxh3_128, values: Tensor) -> None:
    if values.numel():
        hasher.update(values.view(torch.uint8).numpy().data)


def _is_finite(values: Tensor) -> bool:
    if not values.is_floating_point() or values.numel() == 0:
        return True
    wide = values.float() if values.dtype.itemsize == 1 else values
    # A sum is the fastest look at all of them. Where it is finite they are; else it may only be too large.
    if torch.isfinite(wide.sum(dtype=torch.float64 if wide.dtype == torch.float64 else torch.float32)):
        return True
    # Both ends are NaN where any entry is.
    lowest, highest = torch.aminmax(wide)
    return bool(torch.isfinite(lowest) & torch.isfinite(highest))
