"""New weights for a model that generates: read and checked beside the old ones, then exchanged between two steps."""

from engine.weights.digests import Contents, digest_of, digest_of_all, digests_of_ranks
from engine.weights.layers import Paths, path_list
from engine.weights.slots import served_digests
from engine.weights.stage import Part, read_part, stage_weights
from engine.weights.staged import StagedWeights

__all__ = [
    "Contents",
    "Part",
    "Paths",
    "StagedWeights",
    "digest_of",
    "digest_of_all",
    "digests_of_ranks",
    "path_list",
    "read_part",
    "served_digests",
    "stage_weights",
]
