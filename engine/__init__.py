"""Pitstop's engine: continuous batching over any Hugging Face decoder, with weights that change while it generates."""

from engine.block_pool import prefix_digests
from engine.config import ContinuousBatchingConfig
from engine.constraint import TokenConstraint
from engine.errors import (
    ContextLengthExceeded,
    DuplicateRequest,
    EngineDead,
    EngineStopped,
    InvalidRequest,
    NotFinished,
    PitstopError,
    QueueFull,
    SwapConflict,
    UnsupportedModel,
    WeightsError,
    WeightsInvalid,
    WeightsLost,
    WeightsSourceError,
    WeightVersionGone,
)
from engine.generate import (
    ContinuousMixin,
    continuous_batching_context_manager,
    destroy_cached_continuous_batching_manager,
    enable,
    generate_batch,
    init_continuous_batching,
)
from engine.live_weights import ParkedLoop
from engine.manager import ContinuousBatchingManager
from engine.metrics import EngineStats
from engine.model import check_model, check_supported, load_model
from engine.patience import Patience
from engine.rendezvous import RankPlace, join_ranks, open_meeting
from engine.request import (
    NOTHING_LEFT,
    FinishReason,
    GenerationOutput,
    RequestStatus,
    SamplingParams,
    TopLogprobs,
    WeightSpan,
    WorkloadHints,
)
from engine.submission import sequence_ids
from engine.weight_check import CheckedWeights, check_weights
from engine.weights import STORED_DTYPES, StagedWeights, stage_weights

__all__ = [
    "NOTHING_LEFT",
    "STORED_DTYPES",
    "CheckedWeights",
    "ContextLengthExceeded",
    "ContinuousBatchingConfig",
    "ContinuousBatchingManager",
    "ContinuousMixin",
    "DuplicateRequest",
    "EngineDead",
    "EngineStats",
    "EngineStopped",
    "FinishReason",
    "GenerationOutput",
    "InvalidRequest",
    "NotFinished",
    "ParkedLoop",
    "Patience",
    "PitstopError",
    "QueueFull",
    "RankPlace",
    "RequestStatus",
    "SamplingParams",
    "StagedWeights",
    "SwapConflict",
    "TokenConstraint",
    "TopLogprobs",
    "UnsupportedModel",
    "WeightSpan",
    "WeightVersionGone",
    "WeightsError",
    "WeightsInvalid",
    "WeightsLost",
    "WeightsSourceError",
    "WorkloadHints",
    "check_model",
    "check_supported",
    "check_weights",
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
    "enable",
    "generate_batch",
    "init_continuous_batching",
    "join_ranks",
    "load_model",
    "open_meeting",
    "prefix_digests",
    "sequence_ids",
    "stage_weights",
]
