"""How many replicas the work needs: `replicas_needed`, a pure function, and the Ray Serve policy that asks it.

Serve applies the bounds and the delays afterwards. The policy runs in Serve's controller ten times a second: if it
raised, the control plane of the whole cluster would stall, so it never does.
"""

import logging
from math import ceil, isfinite
from typing import Any

from ray.serve.config import AutoscalingContext

logger = logging.getLogger(__name__)

DOWNSCALE_SHARE = 0.7
"""A smaller fleet has to have this much room left, else the next request would bring the replica back."""


def replicas_needed(*, work_s: float, num_requests: float, current: int, target_work_s: float) -> int:
    """Gives the replicas that bring the estimated work of each down to `target_work_s` seconds; at least one.

    work_s: seconds one replica would need for everything queued and running. Never more replicas than requests, since
    a request cannot be shared; never fewer than now unless the work fits the smaller fleet with room to spare.
    """
    needed = ceil(work_s / target_work_s)
    needed = max(1, min(needed, ceil(num_requests)))
    if needed >= current:
        return needed
    with_room = max(1, ceil(work_s / (DOWNSCALE_SHARE * target_work_s)))
    return min(current, max(needed, min(with_room, ceil(num_requests)) if num_requests else 1))


class WorkPolicy:
    """Asks for replicas by the work they report (`work_s` and `num_requests` of `record_autoscaling_stats`)."""

    def __init__(self, target_work_s: float) -> None:
        self._target_work_s = target_work_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Gives the wanted number and the state to keep: how often the policy failed. Never raises."""
        state: dict[str, Any] = {}
        try:
            state = dict(context.policy_state or {})
            return self._decide(context), state
        except Exception as error:
            state["failures"] = state.get("failures", 0) + 1
            if state["failures"] == 1:
                logger.exception("event=autoscaling_failed fallback=keep error=%s", type(error).__name__)
            return context.target_num_replicas, state

    def _decide(self, context: AutoscalingContext) -> int:
        metrics = context.aggregated_metrics or {}
        work_s = sum(metrics.get("work_s", {}).values())
        num_requests = sum(metrics.get("num_requests", {}).values())
        if not isfinite(work_s) or not isfinite(num_requests):
            raise ValueError(f"replicas report {work_s} s of work in {num_requests} requests")
        return replicas_needed(
            work_s=work_s,
            num_requests=num_requests,
            current=context.target_num_replicas,
            target_work_s=self._target_work_s,
        )
