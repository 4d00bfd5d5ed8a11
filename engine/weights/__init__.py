"""New weights for a model that generates: read and checked beside the old ones, then exchanged between two steps."""

from engine.weights.stage import Part, read_part, stage_weights
from engine.weights.staged import StagedWeights

__all__ = ["Part", "StagedWeights", "read_part", "stage_weights"]
