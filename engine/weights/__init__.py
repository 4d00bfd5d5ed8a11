"""New weights for a model that generates: read and checked beside the old ones, then exchanged between two steps."""

from engine.weights.stage import stage_weights
from engine.weights.staged import StagedWeights

__all__ = ["StagedWeights", "stage_weights"]
