"""Which part of a parameter this rank holds, where transformers' tensor parallel plan has cut it.

A cut parameter is a DTensor: the shape of the whole, the part that lies here, and a placement that says how the one is
taken from the other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from engine.errors import WeightsInvalid


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's part: of each of `num_groups` equal groups along `dim` the `rank`-th of `num_ranks` pieces.

    Where the size does not divide, the last ranks have less, as torch has it.
    """

    dim: int
    num_groups: int
    rank: int
    num_ranks: int

    def take(self, whole: Tensor) -> Tensor:
        """Gives the part in memory of its own."""
        parts = [self._piece(group) for group in torch.chunk(whole, self.num_groups, self.dim)]
        return torch.cat(parts, self.dim)

    def _piece(self, group: Tensor) -> Tensor:
        pieces = torch.chunk(group, self.num_ranks, self.dim)
        return pieces[self.rank] if self.rank < len(pieces) else group.narrow(self.dim, 0, 0)


def part_of(tensor: Tensor) -> Tensor:
    """Gives the plain tensor that lies on this rank; for a tensor that is not cut, the tensor itself."""
    # `to_local` gives a new tensor, and exchanging the storage of that would change nothing.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def cut_of(name: str, tensor: Tensor) -> Cut | None:
    """Gives how `tensor` was cut, or None where every rank holds all of it.

    Raises WeightsInvalid for a cut that is not known here, as nothing could be staged for it.
    """
    if not isinstance(tensor, DTensor):
        return None
    placement: Placement = tensor.placements[0]
    if len(tensor.placements) == 1:
        if isinstance(placement, Replicate):
            return None
        # Older versions of torch have it as a kind of Shard.
        if isinstance(placement, _StridedShard):
            return _cut_along(tensor, placement.dim, num_groups=int(placement.split_factor))
        if isinstance(placement, Shard):
            return _cut_along(tensor, placement.dim, num_groups=1)
    raise WeightsInvalid(f"{name} is cut as {tensor.placements}, for which no part can be staged", tensor=name)


def _cut_along(tensor: DTensor, dim: int, *, num_groups: int) -> Cut:
    mesh = tensor.device_mesh
    return Cut(dim % tensor.ndim, num_groups, rank=mesh.get_local_rank(), num_ranks=mesh.size())
