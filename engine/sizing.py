"""What a config means for one model on one device: `None` becomes a number here, and what is not there is refused."""

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.batch import max_read_tokens
from engine.config import (
    DEFAULT_KV_PADDING,
    DEFAULT_MAX_BATCH_TOKENS,
    DEFAULT_MAX_REQUESTS_PER_BATCH,
    DEFAULT_Q_PADDING,
    ContinuousBatchingConfig,
    ResolvedConfig,
)
from engine.errors import InvalidRequest
from engine.graphs import MAX_GRAPH_TOKENS
from engine.host_memory import free_host_bytes, total_host_bytes
from engine.kv_cache import LayerShape
from engine.memory_demand import ACTIVATION_WIDTH, MASKED_TOKENS, MemoryDemand, MemoryRoom, greatest
from engine.model import describe
from engine.request import WorkloadHints

logger = logging.getLogger(__name__)

CPU_STEP_S = 0.5
"""On a CPU a step is kept this short, so that cancelling, pausing and health checks are as quick."""
SAFETY_MARGINS = {"fifo": 0.15, "prefill_first": 0.0, "priority": 0.15, "fair": 0.15}
"""The reference's values; the two orders of ours behave as "fifo" does when memory runs short."""
UNBOUNDED_MODEL_LEN = 1 << 20
"""Stands for the length limit of a model that names none; the cache is then the limit."""

DEFAULT_MEMORY_SHARES = {"cuda": 0.8, "cpu": 0.6}
"""Of free memory. The reference's values; on a GPU the one that leaves room to sample from the whole vocabulary."""
STEP_SHARE = 0.25
"""Of the allowed memory, what the tensors of a step may take before a step gets fewer tokens."""


def resolve_config(
    config: ContinuousBatchingConfig,
    model: PreTrainedModel,
    layers: Sequence[LayerShape],
    hints: WorkloadHints | None = None,
    *,
    free_bytes: int | None = None,
    num_sharers: int = 1,
    no_flash: str | None = "no kernels were given",
    no_graphs: str | None = "nothing was given that captures",
    is_cut: bool = False,
    measure: Callable[[int, int], int] | None = None,
) -> ResolvedConfig:
    """Gives the numbers a manager runs with. Raises InvalidRequest for what cannot be honoured.

    free_bytes: of the model's device; None looks. num_sharers: processes that divide this machine's memory evenly, as
    tensor parallel ranks do. no_flash: why flash attention is not used, None where it is; no_graphs likewise for CUDA
    graphs. is_cut: the model is one of several tensor parallel ranks. measure: gives the bytes that a step of so many
    tokens and rows holds beside what attention reads; None estimates them.
    """
    steps_in_flight = _steps_in_flight(config, model.device, is_cut=is_cut)
    num_on_device = num_sharers if model.device.type == "cpu" else 1
    room = MemoryRoom(
        free_bytes=free_bytes_on(model.device) // num_on_device if free_bytes is None else free_bytes,
        share=config.max_memory_percent or DEFAULT_MEMORY_SHARES.get(model.device.type, DEFAULT_MEMORY_SHARES["cpu"]),
    )
    shape = describe(model)
    model_len = shape.max_model_len or UNBOUNDED_MODEL_LEN
    demand = _demand(config, model, layers, hints or WorkloadHints())
    if no_flash is None:  # which reads the cache in place
        demand = replace(demand, read_bytes=0, mask_bytes=0)
    max_batch_tokens = config.max_batch_tokens or _batch_tokens_in(room, demand)
    demand = replace(demand, max_requests=min(demand.max_requests, max_batch_tokens))
    decode_blocks = _decode_blocks(config, hints or WorkloadHints(), longest=demand.longest, no_flash=no_flash)
    graphs = _graphs(config, decode_blocks=decode_blocks, no_graphs=no_flash or no_graphs)
    if measure is not None:
        demand = replace(demand, measured_bytes=_measured(measure, demand, max_batch_tokens, has_graphs=any(graphs)))
    num_blocks = _num_blocks(config, room, demand, max_batch_tokens)
    cache_bytes = demand.cache_bytes(num_blocks, max_batch_tokens)
    logger.info(
        "cache sized blocks=%d page_size=%d max_batch_tokens=%d cache_gib=%.3f step_gib=%.3f free_gib=%.3f share=%.2f",
        *(num_blocks, demand.page_size, max_batch_tokens, cache_bytes / 2**30),
        *(demand.step_bytes(max_batch_tokens) / 2**30, room.free_bytes / 2**30, room.share),
    )
    if shape.is_cut_short:
        logger.warning("longer requests are refused, the model cannot serve them exactly max_model_len=%d", model_len)
    return ResolvedConfig(
        page_size=demand.page_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=demand.max_requests,
        max_model_len=min(model_len, num_blocks * demand.page_size),
        is_cut_short=shape.is_cut_short and model_len <= num_blocks * demand.page_size,
        vocab_size=shape.vocab_size,
        allow_block_sharing=config.allow_block_sharing,
        safety_margin=SAFETY_MARGINS[config.scheduler_type] if config.safety_margin is None else config.safety_margin,
        max_queue_size=config.max_queue_size,
        # A pause waits for all that is in flight.
        target_step_s=CPU_STEP_S / steps_in_flight if model.device.type == "cpu" else None,
        seed=secrets.randbits(63) if config.seed is None else config.seed,
        return_logprobs=config.return_logprobs,
        scheduler_type=config.scheduler_type,
        steps_in_flight=steps_in_flight,
        windows=demand.windows,
        max_blocks_per_request=decode_blocks,
        use_cuda_graph=graphs,
        q_padding_interval_size=config.q_padding_interval_size or DEFAULT_Q_PADDING,
        kv_padding_interval_size=config.kv_padding_interval_size or DEFAULT_KV_PADDING,
        blocks_of_group=demand.pools(num_blocks, max_batch_tokens),
        num_host_slots=_host_slots(
            config,
            sum(demand.block_bytes) * num_sharers,
            taken_bytes=cache_bytes * num_sharers if model.device.type == "cpu" else 0,
        ),
    )


def _steps_in_flight(config: ContinuousBatchingConfig, device: torch.device, *, is_cut: bool) -> int:
    if is_cut and config.use_async_batching:
        raise InvalidRequest(
            "use_async_batching=True needs a whole model, and this one is cut over tensor parallel ranks; set it to"
            " None or False",
            "use_async_batching",
        )
    is_wanted = device.type == "cuda" if config.use_async_batching is None else config.use_async_batching
    return 2 if is_wanted and not is_cut else 1


def _demand(
    config: ContinuousBatchingConfig, model: PreTrainedModel, layers: Sequence[LayerShape], hints: WorkloadHints
) -> MemoryDemand:
    page_size, dtype = config.tokens_per_block, model.dtype
    model_len = describe(model).max_model_len or UNBOUNDED_MODEL_LEN
    longest = min(hints.max_prompt_length + hints.max_generated_length or model_len, model_len)
    windows = _windows(layers, model_len)
    widest = max(layer.values_per_token for layer in layers) * dtype.itemsize
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    max_requests = config.max_requests_per_batch or hints.num_requests or DEFAULT_MAX_REQUESTS_PER_BATCH
    max_requests = min(max_requests, config.max_batch_tokens or max_requests)
    return MemoryDemand(
        page_size=page_size,
        max_requests=max_requests,
        longest=longest,
        windows=windows,
        block_bytes=tuple(_bytes_per_block(layers, window, model_len, page_size, dtype) for window in windows),
        read_bytes=max_read_tokens(longest, max_requests) * widest,
        mask_bytes=min(longest, MASKED_TOKENS) * dtype.itemsize,
        token_bytes=ACTIVATION_WIDTH * embeddings.embedding_dim * dtype.itemsize,
    )


def _batch_tokens_in(room: MemoryRoom, demand: MemoryDemand) -> int:
    """Gives the tokens of a step that fit a share of the memory, and no more than requests can ever bring."""
    fitting = int(room.allowed_bytes * STEP_SHARE) // (demand.token_bytes + demand.mask_bytes)
    return max(1, min(DEFAULT_MAX_BATCH_TOKENS, fitting, demand.max_requests * demand.longest))


def _measured(
    measure: Callable[[int, int], int], demand: MemoryDemand, max_batch_tokens: int, *, has_graphs: bool
) -> int:
    step_bytes = measure(max_batch_tokens, demand.max_requests)
    if has_graphs:
        # Captured steps have memory of their own, and their padding a block.
        num_tokens = min(MAX_GRAPH_TOKENS, max_batch_tokens)
        step_bytes += measure(num_tokens, min(num_tokens, demand.max_requests)) + sum(demand.block_bytes)
    return step_bytes


def _num_blocks(config: ContinuousBatchingConfig, room: MemoryRoom, demand: MemoryDemand, max_batch_tokens: int) -> int:
    """Gives how many blocks fit the memory beside a step, and no more than requests can ever use."""

    def size(num_blocks: int) -> int:
        return demand.cache_bytes(num_blocks, max_batch_tokens) + demand.step_bytes(max_batch_tokens)

    if config.num_blocks is not None:
        # Who names a number has looked; only what can never be there, or breaks the other number, is refused.
        limit = room.free_bytes if config.max_memory_percent is None else room.allowed_bytes
        if demand.cache_bytes(config.num_blocks, max_batch_tokens) > limit:
            raise InvalidRequest(
                f"num_blocks={config.num_blocks} takes {size(config.num_blocks) / 2**20:.0f} MiB, and"
                f" {limit / 2**20:.0f} MiB may be used; lower num_blocks or raise max_memory_percent",
                "num_blocks",
            )
        return config.num_blocks
    num_blocks = greatest(lambda count: size(count) <= room.allowed_bytes, demand.useful_blocks)
    if num_blocks < 1:
        raise InvalidRequest(
            f"one block of the cache and a step of {max_batch_tokens} tokens take {size(1) / 2**20:.1f} MiB, and of"
            f" {room.free_bytes / 2**20:.1f} MiB of free memory {room.share:.0%} may be used; lower page_size or"
            " max_batch_tokens, or free memory",
            "num_blocks",
        )
    return num_blocks


def _decode_blocks(
    config: ContinuousBatchingConfig, hints: WorkloadHints, *, longest: int, no_flash: str | None
) -> int:
    """Gives the width of the decode kernel's block table."""
    wanted, page_size = config.max_blocks_per_request, config.tokens_per_block
    if no_flash is not None:
        if wanted:
            raise InvalidRequest(
                f"max_blocks_per_request={wanted} shapes the decode way of flash attention, which is not used here:"
                f" {no_flash}; leave it at None",
                "max_blocks_per_request",
            )
        return 0
    if wanted is not None:
        return wanted
    hinted = hints.max_prompt_length + hints.max_generated_length
    # The reference's rule: one block to spare, and an even number.
    return 2 * -(-(-(-hinted // page_size) + 1) // 2) if hinted else -(-longest // page_size)


def _graphs(config: ContinuousBatchingConfig, *, decode_blocks: int, no_graphs: str | None) -> tuple[bool, bool]:
    """Gives whether steps of any rows, and of single tokens, are captured."""
    wanted = config.use_cuda_graph
    pair = wanted if isinstance(wanted, tuple) else (wanted, wanted)
    intervals = [name for name in ("q_padding_interval_size", "kv_padding_interval_size") if getattr(config, name) != 0]
    asking = ["use_cuda_graph"] if any(pair) else intervals
    if asking and no_graphs is not None:
        name, value = asking[0], getattr(config, asking[0])
        raise InvalidRequest(
            f"{name}={value!r} asks for CUDA graphs, which are not used here: {no_graphs}; leave it at its default",
            name,
        )
    if intervals and wanted is not None and not any(pair):
        raise InvalidRequest(
            f"{intervals[0]} pads the CUDA graphs that use_cuda_graph={wanted!r} declines", intervals[0]
        )
    if isinstance(wanted, tuple) and wanted[1] and decode_blocks == 0:
        raise InvalidRequest(
            f"use_cuda_graph={wanted!r} captures the decode way that max_blocks_per_request=0 closes", "use_cuda_graph"
        )
    packed, decode = (no_graphs is None if one is None else one for one in pair)
    return packed, decode and decode_blocks > 0


def _windows(layers: Sequence[LayerShape], model_len: int) -> tuple[int | None, ...]:
    """Gives one entry for each kind of layer; a window that no sequence outgrows is none."""
    windows = {None if layer.window is None or layer.window >= model_len else layer.window for layer in layers}
    return tuple(sorted(windows, key=lambda window: (window is not None, window)))


def _bytes_per_block(
    layers: Sequence[LayerShape], window: int | None, model_len: int, page_size: int, dtype: torch.dtype
) -> int:
    """Gives the size of one block over all layers of a group."""
    members = [layer for layer in layers if _windows([layer], model_len) == (window,)]
    return sum(layer.values_per_token for layer in members) * page_size * dtype.itemsize


def _host_slots(config: ContinuousBatchingConfig, block_bytes: int, *, taken_bytes: int) -> int:
    """Gives the blocks that fit the host tier; `cpu_offload_space` of None takes half of what is left there.

    taken_bytes: what the cache itself is about to take of the host's memory.
    """
    allowed_bytes = int(total_host_bytes() * config.cpu_offload_space_safety_threshold)
    if config.cpu_offload_space is None:
        return min(allowed_bytes, max(0, free_host_bytes() - taken_bytes) // 2) // block_bytes
    wanted_bytes = int(config.cpu_offload_space * 2**30)
    if wanted_bytes > allowed_bytes:
        logger.warning(
            "cpu_offload_space is cut by its safety threshold wanted_gib=%.2f allowed_gib=%.2f",
            *(wanted_bytes / 2**30, allowed_bytes / 2**30),
        )
    return min(wanted_bytes, allowed_bytes) // block_bytes


def free_bytes_on(device: torch.device) -> int:
    """Gives the memory of a device that nobody has taken; of the CPU that of the host."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()
