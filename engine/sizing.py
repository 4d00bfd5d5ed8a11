"""What a config means for one model on one device: `None` becomes a number here, and what is not there is refused."""

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
from engine.kv_cache import LayerShape, bytes_per_block
from engine.model import describe
from engine.request import WorkloadHints

CPU_STEP_S = 0.5
"""On a CPU a step is kept this short, so that cancelling, pausing and health checks are as quick."""
SAFETY_MARGIN = 0.15
"""The reference's value for first come, first served."""
UNBOUNDED_MODEL_LEN = 1 << 20
"""Stands for the length limit of a model that names none; the cache is then the limit."""

NOT_AVAILABLE: dict[str, tuple[object, ...]] = {
    "use_async_batching": (None, False),
    "use_cuda_graph": (None, False, (False, False)),
    "varlen_compile_config": (None,),
    "decode_compile_config": (None,),
    "default_compile_level": (0,),
    "cpu_offload_space": (0.0,),
    "use_default_compile_configs": (None, False),
    "max_cached_graphs": (None,),
    "q_padding_interval_size": (0,),
    "kv_padding_interval_size": (0,),
    "max_blocks_per_request": (None, 0),
    "scheduler_type": ("fifo",),
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
    page_size = config.block_size or config.page_size
    on_cpu = model.device.type == "cpu"
    shape = describe(model)
    max_batch_tokens = config.max_batch_tokens or DEFAULT_MAX_BATCH_TOKENS
    max_requests = config.max_requests_per_batch or hints.num_requests or DEFAULT_MAX_REQUESTS_PER_BATCH
    max_requests = min(max_requests, max_batch_tokens)
    model_len = shape.max_model_len or UNBOUNDED_MODEL_LEN
    longest = min(hints.max_prompt_length + hints.max_generated_length or model_len, model_len)
    num_blocks = config.num_blocks or _blocks_in_memory(
        config,
        model,
        bytes_per_block(layers, page_size=page_size, dtype=model.dtype),
        max_requests * -(-longest // page_size),
    )
    return ResolvedConfig(
        page_size=page_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=max_requests,
        max_model_len=min(model_len, num_blocks * page_size),
        vocab_size=shape.vocab_size,
        allow_block_sharing=config.allow_block_sharing,
        safety_margin=SAFETY_MARGIN if config.safety_margin is None else config.safety_margin,
        max_queue_size=config.max_queue_size,
        target_step_s=CPU_STEP_S if on_cpu else None,
        seed=secrets.randbits(63) if config.seed is None else config.seed,
        return_logprobs=config.return_logprobs,
    )


def _blocks_in_memory(
    config: ContinuousBatchingConfig,
    model: PreTrainedModel,
    block_bytes: int,
    useful: int,
) -> int:
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
    return min(fitting, useful)


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
