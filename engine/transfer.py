"""Small arrays of the host on their way to the device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(
    values: Sequence[int] | Sequence[float] | np.ndarray, device: torch.device, dtype: type = np.int64
) -> Tensor:
    """Gives the values as a tensor on the device; on a GPU in the order of its stream, which nobody waits for."""
    tensor = torch.from_numpy(np.asarray(values, dtype=dtype))
    if device.type == "cuda":
        # From other memory than pinned the copy would wait for all that was launched before it.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
