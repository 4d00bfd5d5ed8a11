"""Temperature, top-k and top-p, row by row, with the results of transformers' warpers.

Each works in place on scores that the caller owns. Shapes: R rows, V vocabulary, C candidates.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.transfer import to_device

_NUM_CANDIDATES = 512
"""Best tokens looked at before a whole row is sorted; a sort of 49,152 scores takes 40 times as long as this."""
_MARGIN = 1e-5
"""Ten times the rounding error of a cumulative probability in float32: nearer to top_p, only the sort decides."""


def apply_temperature(scores_RV: Tensor, temperatures: Sequence[float]) -> None:
    """Divides each row by its temperature, one a row, above 0."""
    temperature_R = to_device(temperatures, scores_RV.device, np.float64)
    max_R1 = scores_RV.amax(dim=-1, keepdim=True)
    scaled_RV = scores_RV / temperature_R[:, None].to(scores_RV.dtype)
    overflown_R = ~torch.isfinite(scaled_RV.amax(dim=-1))
    # Only a number below 1 makes scores larger, and to look costs a wait for the device.
    if min(temperatures) < 1 and bool(overflown_R.any()):
        # Softmax does not change under a shift: the best score becomes 0 and the others may sink to -inf.
        shifted_RV = scores_RV[overflown_R].double() - max_R1[overflown_R].double()
        scaled_RV[overflown_R] = (shifted_RV / temperature_R[overflown_R, None]).to(scores_RV.dtype)
    scores_RV.copy_(scaled_RV)


def apply_top_k(scores_RV: Tensor, top_k: Sequence[int]) -> None:
    """Sets to -inf what is below the k-th best score of the row (ties with it stay); 0 keeps the row as it is.

    top_k: one a row, none above the size of the vocabulary.
    """
    k_R = to_device(top_k, scores_RV.device)
    best_RC = scores_RV.topk(max(top_k), dim=-1).values
    least_R1 = best_RC.gather(-1, (k_R - 1).clamp(min=0)[:, None])
    least_R1 = least_R1.masked_fill((k_R == 0)[:, None], float("-inf"))
    scores_RV.masked_fill_(scores_RV < least_R1, float("-inf"))


def apply_top_p(scores_RV: Tensor, top_p_R: Tensor) -> None:
    """Sets to -inf what is outside the smallest set of best tokens that reaches `top_p` (float64, in (0, 1)).

    The kept set is that of transformers' TopPLogitsWarper, its choice among equal scores included.
    """
    if scores_RV.shape[-1] <= _NUM_CANDIDATES:
        _keep_sorted(scores_RV, top_p_R)
        return
    best_RC, ids_RC = scores_RV.topk(_NUM_CANDIDATES, dim=-1)
    probs_RC = scores_RV.softmax(dim=-1).gather(-1, ids_RC).double()
    mass_before_RC = probs_RC.cumsum(dim=-1) - probs_RC
    # None is kept of a row that holds NaN, and its scores do not count.
    num_kept_R = (mass_before_RC < top_p_R[:, None]).sum(dim=-1).clamp(min=1)
    least_R1 = best_RC.gather(-1, num_kept_R[:, None] - 1)
    next_R1 = best_RC.gather(-1, num_kept_R[:, None].clamp(max=_NUM_CANDIDATES - 1))
    distance_R = (mass_before_RC - top_p_R[:, None]).abs().amin(dim=-1)
    # Where the set does not end among the candidates, next equals least.
    is_certain_R = (distance_R > _MARGIN) & (next_R1 < least_R1)[:, 0]
    least_R1 = least_R1.masked_fill(~is_certain_R[:, None], float("-inf"))
    scores_RV.masked_fill_(scores_RV < least_R1, float("-inf"))
    if not bool(is_certain_R.all()):
        rest_RV = scores_RV[~is_certain_R]
        _keep_sorted(rest_RV, top_p_R[~is_certain_R])
        scores_RV[~is_certain_R] = rest_RV


def _keep_sorted(scores_RV: Tensor, top_p_R: Tensor) -> None:
    """The same by a sort of whole rows, in float32 and from the worst token up, to round as transformers does."""
    sorted_RV, ids_RV = scores_RV.sort(dim=-1)
    mass_RV = sorted_RV.softmax(dim=-1).cumsum(dim=-1)
    is_out_RV = mass_RV <= (1 - top_p_R)[:, None].to(mass_RV.dtype)
    is_out_RV[:, -1] = False
    scores_RV.masked_fill_(is_out_RV.scatter(-1, ids_RV, is_out_RV), float("-inf"))
