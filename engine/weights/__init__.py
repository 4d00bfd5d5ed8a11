"""New weights for a model that generates: read and checked beside the old ones, then exchanged between two steps."""

from engine.weights.digests import Contents, digest_of, digest_of_all, digests_of_ranks
from engine.weights.folder import STORED_DTYPES
from engine.weights.layers import Paths, path_list
from engine.weights.marks import marks_of
from engine.weights.slots import served_digests
from engine.weights.source import open_source
from engine.weights.stage import Part, read_part, stage_weights
from engine.weights.staged import StagedWeights
from engine.weights.streamed import StreamedWeights, bytes_beside, stage_streamed

__all__ = [
    "STORED_DTYPES",
    "Contents",
    "Part",
    "Paths",
    "StagedWeights",
    "StreamedWeights",
    "bytes_beside",
    "digest_of",
    "digest_of_all",
    "digests_of_ranks",
    "marks_of",
    "open_source",
    "path_list",
    "read_part",
    "served_digests",
    "stage_streamed",
    "stage_weights",
]
