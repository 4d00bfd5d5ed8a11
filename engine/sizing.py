"""What a config means for one model on one device: `None` becomes a number here, and what is not there is refused."""

import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from engine.config import (
    DEFAULT_MAX_BATCH_TOKENS,
    DEFAULT_MAX_REQUESTS_PER_BATCH,
    ContinuousBatchingConfig,
    ResolvedConfig,
)
from engine.errors import InvalidRequest
from engine.kv_cache import LayerShape
from engine.model import describe
from engine.request import WorkloadHints

logger = logging.getLogger(__name__)

CPU_STEP_S = 0.5
"""On a CPU a step is kept this short, so that cancelling, pausing and health checks are as quick."""
SAFETY_MARGINS = {"fifo": 0.15, "prefill_first": 0.0, "priority": 0.15, "fair": 0.15}
"""The reference's values; the two orders of ours behave as "fifo" does when memory runs short."""
UNBOUNDED_MODEL_LEN = 1 << 20
"""Stands for the length limit of a model that names none; the cache is then the limit."""

NOT_AVAILABLE: dict[str, tuple[object, ...]] = {
    "use_async_batching": (None, False),
    "use_cuda_graph": (None, False, (False, False)),
    "varlen_compile_config": (None,),
    "decode_compile_config": (None,),
    "compile_level": (0,),
    "q_padding_interval_size": (0,),
    "kv_padding_interval_size": (0,),
    "max_blocks_per_request": (None, 0),
}
"""Parameters this version has no use for, with the values that do not ask for one."""


def resolve_config(
    config: ContinuousBatchingConfig,
    model: PreTrainedModel,
    layers: Sequence[LayerShape],
    hints: WorkloadHints | None = None,
) -> ResolvedConfig:
    """Gives the numbers a manager runs with. Raises InvalidRequest for what cannot be honoured."""
    for name, accepted in NOT_AVAILABLE.items():
        value = getattr(config, name)
        if value not in accepted:
            raise InvalidRequest(
                f"{name}={value!r} is not available in this version; leave it at its default",
                param=name,
            )
    hints = hints or WorkloadHints()
    page_size = config.tokens_per_block
    on_cpu = model.device.type == "cpu"
    shape = describe(model)
    max_batch_tokens = config.max_batch_tokens or DEFAULT_MAX_BATCH_TOKENS
    max_requests = config.max_requests_per_batch or hints.num_requests or DEFAULT_MAX_REQUESTS_PER_BATCH
    max_requests = min(max_requests, max_batch_tokens)
    model_len = shape.max_model_len or UNBOUNDED_MODEL_LEN
    longest = min(hints.max_prompt_length + hints.max_generated_length or model_len, model_len)
    windows = _windows(layers, model_len)
    sizes = [_bytes_per_block(layers, window, model_len, page_size, model.dtype) for window in windows]
    useful = max_requests * -(-longest // page_size)
    num_blocks = config.num_blocks or _blocks_in_memory(config, model, sum(sizes), useful)
    return ResolvedConfig(
        page_size=page_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=max_requests,
        max_model_len=min(model_len, num_blocks * page_size),
        vocab_size=shape.vocab_size,
        allow_block_sharing=config.allow_block_sharing,
        safety_margin=SAFETY_MARGINS[config.scheduler_type] if config.safety_margin is None else config.safety_margin,
        max_queue_size=config.max_queue_size,
        target_step_s=CPU_STEP_S if on_cpu else None,
        seed=secrets.randbits(63) if config.seed is None else config.seed,
        return_logprobs=config.return_logprobs,
        scheduler_type=config.scheduler_type,
        windows=windows,
        blocks_of_group=tuple(
            _pool_size(window, num_blocks, page_size, max_requests, max_batch_tokens) for window in windows
        ),
        num_host_slots=_host_slots(config, sum(sizes)),
    )


def _windows(layers: Sequence[LayerShape], model_len: int) -> tuple[int | None, ...]:
    """Gives one entry for each kind of layer; a window that no sequence outgrows is none."""
    windows = {None if layer.window is None or layer.window >= model_len else layer.window for layer in layers}
    return tuple(sorted(windows, key=lambda window: (window is not None, window)))


def _pool_size(window: int | None, num_blocks: int, page_size: int, max_requests: int, max_batch_tokens: int) -> int:
    """Gives the blocks that layers with this window can use at most; one request alone always fits."""
    if window is None:
        return num_blocks
    per_request = -(-window // page_size) + 1
    return max(per_request + 1, min(num_blocks, max_requests * per_request + -(-max_batch_tokens // page_size)))


def _bytes_per_block(
    layers: Sequence[LayerShape], window: int | None, model_len: int, page_size: int, dtype: torch.dtype
) -> int:
    """Gives the size of one block over all layers of a group."""
    members = [layer for layer in layers if _windows([layer], model_len) == (window,)]
    return sum(layer.values_per_token for layer in members) * page_size * dtype.itemsize


def _host_slots(config: ContinuousBatchingConfig, block_bytes: int) -> int:
    """Gives the blocks that fit the host tier; `cpu_offload_space` of None takes what the safety threshold leaves."""
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed_bytes = int(total_bytes * config.cpu_offload_space_safety_threshold)
    if config.cpu_offload_space is None:
        return min(allowed_bytes, _free_host_bytes() // 2) // block_bytes
    wanted_bytes = int(config.cpu_offload_space * 2**30)
    if wanted_bytes > allowed_bytes:
        logger.warning(
            "cpu_offload_space is cut by its safety threshold wanted_gib=%.2f allowed_gib=%.2f",
            wanted_bytes / 2**30,
            allowed_bytes / 2**30,
        )
    return min(wanted_bytes, allowed_bytes) // block_bytes


def _blocks_in_memory(config: ContinuousBatchingConfig, model: PreTrainedModel, block_bytes: int, useful: int) -> int:
    """Gives how many blocks fit into the allowed share of free memory, and no more than requests can ever use."""
    if model.device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(model.device)[0]
        share = config.max_memory_percent or 0.8
    else:
        free_bytes = _free_host_bytes()
        share = config.max_memory_percent or 0.6
    fitting = int(free_bytes * share) // block_bytes
    if fitting < 1:
        raise InvalidRequest(
            f"one block of the cache takes {block_bytes / 2**20:.0f} MiB, and of {free_bytes / 2**20:.0f} MiB of free"
            f" memory {share:.0%} may be used; lower page_size or free memory",
            param="num_blocks",
        )
    num_blocks = min(fitting, useful)
    logger.info(
        "cache sized blocks=%d gib=%.2f free_gib=%.2f share=%.2f",
        num_blocks,
        num_blocks * block_bytes / 2**30,
        free_bytes / 2**30,
        share,
    )
    return num_blocks


def _free_host_bytes() -> int:
    """Memory that can be had without swapping, within the limit of the control group where there is one."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (
        Path("/sys/fs/cgroup/memory.max"),
        Path("/sys/fs/cgroup/memory.current"),
    )
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free
