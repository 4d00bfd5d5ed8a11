"""Which backend computes attention for one model on one device."""

import logging
from collections.abc import Sequence

import torch

from engine.attention.flash import FlashKernels, objection_to_flash
from engine.config import ContinuousBatchingConfig
from engine.kv_cache import LayerShape

logger = logging.getLogger(__name__)


def choose_flash(
    found: FlashKernels | str, config: ContinuousBatchingConfig, layers: Sequence[LayerShape], *, dtype: torch.dtype
) -> FlashKernels | str:
    """Gives the flash kernels where they can compute this model and are wanted, else why torch's own attention does.

    found: the device's kernels, or why it has none.
    """
    chosen = _choose(found, config, layers, dtype)
    if isinstance(chosen, str):
        logger.info("attention is torch's scaled dot product backend=sdpa reason=%r", chosen)
    else:
        logger.info("attention is flash-attn's backend=flash")
    return chosen


def _choose(
    found: FlashKernels | str, config: ContinuousBatchingConfig, layers: Sequence[LayerShape], dtype: torch.dtype
) -> FlashKernels | str:
    if not config.auto_switch_to_flash:
        return "auto_switch_to_flash is False"
    if isinstance(found, str):
        return found
    return objection_to_flash(found, layers, dtype=dtype, page_size=config.tokens_per_block) or found
