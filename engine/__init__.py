"""Pitstop's engine: continuous batching over any Hugging Face decoder, with weights that change while it generates."""

from engine.config import ContinuousBatchingConfig
from engine.errors import (
    ContextLengthExceeded,
    DuplicateRequest,
    EngineDead,
    EngineStopped,
    InvalidRequest,
    PitstopError,
    QueueFull,
    SwapConflict,
    UnsupportedModel,
    WeightsError,
    WeightsInvalid,
    WeightsSourceError,
)
from engine.metrics import EngineStats
from engine.request import (
    FinishReason,
    GenerationOutput,
    RequestStatus,
    SamplingParams,
    WeightSpan,
    WorkloadHints,
)

__all__ = [
    "ContextLengthExceeded",
    "ContinuousBatchingConfig",
    "DuplicateRequest",
    "EngineDead",
    "EngineStats",
    "EngineStopped",
    "FinishReason",
    "GenerationOutput",
    "InvalidRequest",
    "PitstopError",
    "QueueFull",
    "RequestStatus",
    "SamplingParams",
    "SwapConflict",
    "UnsupportedModel",
    "WeightSpan",
    "WeightsError",
    "WeightsInvalid",
    "WeightsSourceError",
    "WorkloadHints",
]
