"""What new weights are compared with before and after they serve."""

import math
from collections.abc import Mapping, Sequence

from engine import WeightsInvalid
from serve_app.messages import Probes, SwapOrder


def check_probes(found: Sequence[Sequence[float]], probes: Probes) -> None:
    """Raises WeightsInvalid where a log-probability is not finite, or too far from the reference."""
    for number, row in enumerate(found):
        if not all(math.isfinite(value) for value in row):
            raise WeightsInvalid(f"with these weights a log-probability of probe {number} is not finite")
    if probes.reference is None:
        return
    for number, (row, wanted) in enumerate(zip(found, probes.reference, strict=True)):
        if len(row) != len(wanted):
            raise WeightsInvalid(
                f"probe {number} gives {len(row)} log-probabilities and its reference has {len(wanted)}; give one for "
                "each token after the first"
            )
        difference = max((abs(a - b) for a, b in zip(row, wanted, strict=True)), default=0.0)
        if difference > probes.max_abs_difference:
            raise WeightsInvalid(
                f"a log-probability of probe {number} is {difference:.3g} from its reference; at most "
                f"{probes.max_abs_difference:g} is allowed"
            )


def check_digest(found: str, order: SwapOrder) -> None:
    """Raises WeightsInvalid where what was read are not the weights that an order names."""
    if order.digest is not None and found != order.digest:
        raise WeightsInvalid(
            f"{order.source or 'the configured model'} no longer holds the weights that were committed; it was written "
            "to since"
        )


def first_difference(found: Mapping[str, str], expected: Mapping[str, str]) -> str | None:
    """Gives the first tensor, by name, whose digests differ or that only one side has; None where all are equal."""
    names = sorted(found.keys() | expected.keys())
    return next((name for name in names if found.get(name) != expected.get(name)), None)
