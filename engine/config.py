"""Every knob of the engine, once: the reference page's names, order and defaults.

The object a caller makes is never written to; what a model and a device make of it is a `ResolvedConfig`.
"""

import warnings
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import ArgsKwargs

DEFAULT_MAX_BATCH_TOKENS = 8192
"""The reference's value; on a CPU the step-time bound of the loop usually cuts in first."""
DEFAULT_MAX_REQUESTS_PER_BATCH = 1024
DEFAULT_Q_PADDING = 64
DEFAULT_KV_PADDING = 16_384
DEPRECATED = {
    "use_default_compile_configs": "use default_compile_level, of which True is level 3",
    "max_cached_graphs": "the number of graphs is not limited any more",
    "block_size": "use page_size",
}


@pydantic_dataclass(
    frozen=True,
    config=ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True),
)
class ContinuousBatchingConfig:
    """How one manager batches, caches and schedules. `None` means "choose for me".

    page_size: tokens per block of the KV cache.
    num_blocks: blocks in the cache; None takes what memory allows and requests can use.
    max_batch_tokens: tokens computed in one step at most; None is 8192, less where memory is short or requests are few.
    max_memory_percent: share of free memory that the cache and a step may take, which a GPU runs once to measure it;
        None is 0.8, on a CPU 0.6. The 0.9 of the reference is for greedy requests alone, and here each may sample.
    max_requests_per_batch: requests running at once; None takes the workload hints, else 1024.
    max_blocks_per_request: blocks of the longest request that takes the decode kernel of flash attention, which is
        faster for single tokens; longer ones take the general one. 0 closes the decode way; None is what the workload
        hints or the model's length come to.
    allow_block_sharing: reuse blocks of equal prefixes.
    use_async_batching: plan a step while the one before it runs, and publish that one while the next runs; None does so
        on a GPU. A pause then waits for two steps. A request that has processors (any field of `SamplingParams` that
        acts on scores, beyond temperature, top_k and top_p) takes part in every other step, since they have to see the
        token of the step before; the others go on. Refused where the model is cut over tensor parallel ranks.
    use_cuda_graph: replay captured steps, of any rows and of single tokens; one answer or a pair. None is yes where
        flash attention computes and no elsewhere; a model that cannot be captured runs without, with a warning.
    q_padding_interval_size: a captured step is padded to a multiple of so many tokens; 0 is 64. Setting it asks for
        graphs.
    kv_padding_interval_size: the longest row of a captured step counts as a multiple of so many keys; 0 is 16,384.
        Setting it asks for graphs.
    varlen_compile_config: how torch.compile compiles steps of any rows: a CompileConfig of transformers, or its fields.
        None is what default_compile_level says, at level 0 the compile_config of the generation config. Attention stays
        outside, as one operator.
    decode_compile_config: the same for steps of single tokens.
    default_compile_level: 0 compiles nothing; 1 is mode "default" for steps of every size; 2 is
        "max-autotune-no-cudagraphs" likewise; 3 the same for fixed sizes: steps are padded to multiples of 64 tokens,
        and each size is compiled when it first comes. On a CPU 1 gives a tenth fewer tokens than 0 (30 layers of width
        576, 16 requests, one thread) after 40 to 120 s of compiling: it stands in for the packed weights and the fused
        layers of float32. On a GPU it is not measured yet.
    scheduler_type: "fifo" (decode first), "prefill_first", "priority" (smallest first), "fair" (between tenants).
    safety_margin: share of the blocks below which no further request is admitted; None is 0.15, prefill_first 0.
    cpu_offload_space: GiB of host memory where evicted blocks of the prefix cache go; None takes half of what is free.
    cpu_offload_space_safety_threshold: share of the machine's memory that the host tier never exceeds.
    auto_switch_to_flash: on CUDA compute attention with flash-attn where it is installed and can compute the model.
    return_logprobs: log-probabilities for every request that does not say otherwise.
    seed: derives the seed of requests that bring none; None draws it at random.
    disable_nccl_graph_mixing: under tensor parallelism on GPUs, set NCCL_GRAPH_MIXING_SUPPORT=0 where the environment
        has no value for it.
    max_queue_size: requests that may wait; 0 is unlimited.
    per_request_processors: accept sampling keywords in `add_request(**logit_processor_kwargs)`.
    drop_unsupported_processors: generate without the processors that a model's class adds and that are not of
        transformers, with a warning that names them; False refuses such a model.
    pack_weights: (ours) on a CPU in float32, keep a second copy of the linear weights in the layout that they are
        multiplied fastest in; None does where the copies take at most a quarter of free memory.
    """

    page_size: int = Field(default=256, ge=4)
    num_blocks: int | None = Field(default=None, ge=1)
    max_batch_tokens: int | None = Field(default=None, ge=1)
    max_memory_percent: float | None = Field(default=None, gt=0, le=1)
    max_requests_per_batch: int | None = Field(default=None, ge=1)
    max_blocks_per_request: int | None = Field(default=None, ge=0)
    allow_block_sharing: bool = True
    use_async_batching: bool | None = None
    use_cuda_graph: bool | tuple[bool, bool] | None = None
    q_padding_interval_size: int = Field(default=0, ge=0)
    kv_padding_interval_size: int = Field(default=0, ge=0)
    varlen_compile_config: Any = None
    decode_compile_config: Any = None
    default_compile_level: int = Field(default=0, ge=0, le=3)
    scheduler_type: Literal["fifo", "prefill_first", "priority", "fair"] = "fifo"
    safety_margin: float | None = Field(default=None, ge=0, le=1)
    return_logprobs: bool = False
    seed: int | None = None
    auto_switch_to_flash: bool = True
    cpu_offload_space: float | None = Field(default=0.0, ge=0)
    cpu_offload_space_safety_threshold: float = Field(default=0.8, gt=0, le=1)
    max_queue_size: int = Field(default=0, ge=0)
    per_request_processors: bool = False
    drop_unsupported_processors: bool = True
    disable_nccl_graph_mixing: bool = True
    cpu_group_timeout: float | None = Field(default=300.0, gt=0)
    use_default_compile_configs: bool | None = None
    max_cached_graphs: int | None = None
    block_size: int | None = Field(default=None, ge=4)
    pack_weights: bool | None = None

    @model_validator(mode="after")
    def _warn_of_deprecated(self) -> Self:
        for name, remedy in DEPRECATED.items():
            if getattr(self, name) is not None:
                warnings.warn(f"{name} is deprecated: {remedy}", FutureWarning, stacklevel=4)
        return self

    @model_validator(mode="before")
    @classmethod
    def _refuse_two_names(cls, given: Any) -> Any:
        fields = given.kwargs if isinstance(given, ArgsKwargs) else given
        fields = fields if isinstance(fields, dict) else {}
        old, new = fields.get("block_size"), fields.get("page_size")
        if old is not None and new not in (None, old):
            raise ValueError(
                f"block_size is {old!r}, the deprecated name of page_size, which is {new!r}; give page_size alone"
            )
        return given

    @property
    def tokens_per_block(self) -> int:
        """`page_size`, or what its deprecated name says."""
        return self.block_size or self.page_size

    @property
    def compile_level(self) -> int:
        """`default_compile_level`, or what its deprecated name says."""
        return self.default_compile_level or 3 * bool(self.use_default_compile_configs)


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """What one model on one device runs with. Lengths in tokens, times in seconds."""

    page_size: int
    num_blocks: int
    max_batch_tokens: int
    max_requests_per_batch: int
    max_model_len: int
    vocab_size: int
    allow_block_sharing: bool
    safety_margin: float
    max_queue_size: int
    target_step_s: float | None
    """A step is kept shorter than this by giving it fewer prompt tokens; None does not bound it."""
    seed: int
    return_logprobs: bool
    scheduler_type: Literal["fifo", "prefill_first", "priority", "fair"] = "fifo"
    steps_in_flight: int = 1
    """At most: with 2 a step is planned while the one before it runs."""
    windows: tuple[int | None, ...] = (None,)
    """What the layers of each block group can see, in tokens; None is everything."""
    blocks_of_group: tuple[int, ...] = ()
    """Blocks in the pool of each group; () gives `num_blocks` to each."""
    max_blocks_per_request: int = 0
    """Blocks up to which a request takes flash attention's decode kernel."""
    use_cuda_graph: tuple[bool, bool] = (False, False)
    """Whether steps of any rows, and steps of single tokens, are captured and replayed."""
    q_padding_interval_size: int = DEFAULT_Q_PADDING
    kv_padding_interval_size: int = DEFAULT_KV_PADDING
    num_host_slots: int = 0
    """Blocks of each group that the host tier holds."""
    is_cut_short: bool = False
    """Whether `max_model_len` is less than the model was made for, as `engine.model.ModelShape` says."""

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Blocks in the pool of each group of layers."""
        return self.blocks_of_group or (self.num_blocks,) * len(self.windows)

    def group_of(self, window: int | None) -> int:
        """Gives the group of a layer that sees `window` tokens; one that sees as many as fit sees everything."""
        sees_all = window is None or window >= self.max_model_len
        return self.windows.index(None if sees_all else window)
