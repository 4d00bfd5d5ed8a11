"""The Ray Serve policy that asks `decision` how many replicas the fleet should have.

It runs in Serve's controller ten times a second: if it raised, the control plane of the whole cluster would stall, and
while it waited, everything would; so it does neither. Delays and limits are applied in `decision`, Serve's own are off.
"""

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from ray.serve.config import AutoscalingContext

from serve_app.scaling.decision import FleetLoad, ScalingDecision, ScalingReason, ScalingState, ScalingTargets, decide
from serve_app.scaling.news import ScalingNews
from serve_app.scaling_report import ScalingChange, ScalingReport

logger = logging.getLogger("ray.serve.pitstop")

MAX_CHANGES = 16
"""That are told; more than anybody reads."""
SUMS = ("prefill_tokens", "decode_tokens", "num_requests", "work_s", "arrived_s")
MEANS = ("kv_usage",)
SPEEDS = ("step_s", "request_s", "token_s", "max_running")
"""Of those that have measured them; of a new replica they are 0."""


class WorkPolicy:
    """Asks for replicas by what they report in `record_autoscaling_stats`. One thread only."""

    def __init__(self, targets: Mapping[str, float], *, tell: Callable[[ScalingReport], None] | None = None) -> None:
        """targets: the fields of `ScalingTargets`. tell: takes every report; None sends them where they are shown."""
        self._targets = ScalingTargets(**targets)  # type: ignore[arg-type]  # integers that JSON keeps as they are
        self._state = ScalingState()
        self._tell = tell
        self._source = uuid.uuid4().hex[:8]
        self._known: int | None = None
        self._latest: ScalingDecision | None = None
        self._changes: tuple[ScalingChange, ...] = ()
        self._num_failures = 0

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Gives the wanted number, and no state for Serve to keep. Never raises."""
        try:
            self._note_change(context.target_num_replicas, now=time.time())
            wanted = self._decide(context).num_replicas
        except Exception as error:
            self._num_failures += 1
            wanted = context.target_num_replicas
            if self._num_failures == 1:
                logger.exception("event=autoscaling_failed fallback=keep error=%s", type(error).__name__)
        try:
            self._report(context.app_name or "", wanted)
        except Exception:
            logger.exception("event=scaling_report_failed")
        return wanted, {}

    def _decide(self, context: AutoscalingContext) -> ScalingDecision:
        decision = decide(
            fleet_load(context),
            self._targets,
            current=context.target_num_replicas,
            now=time.monotonic(),
            state=self._state,
        )
        self._state, self._latest = decision.state, decision
        return decision

    def _note_change(self, target: int, *, now: float) -> None:
        """Notes what Serve has made of the latest decision; it wakes a fleet without replicas by itself."""
        before, self._known = self._known, target
        if before is None or before == target:
            return
        latest = self._latest
        # Serve goes from several replicas to none over one.
        if latest is not None and (before < target <= latest.num_replicas or before > target >= latest.num_replicas):
            reason, why = latest.reason.value, latest.why
        elif before == 0:
            reason, why = ScalingReason.WAKE.value, "a request came while no replica ran"
        else:
            reason, why = "config", "the limits were changed, or replicas were asked for by hand"
        number = self._changes[0].number + 1 if self._changes else 1
        change = ScalingChange(number, now, before, target, reason, why)
        self._changes = (change, *self._changes)[:MAX_CHANGES]
        logger.info("event=scaled before=%d after=%d reason=%s why=%r", before, target, reason, why)

    def _report(self, application: str, wanted: int) -> None:
        if self._tell is None:
            self._tell = ScalingNews(application).tell
        latest = self._latest
        self._tell(
            ScalingReport(
                source=self._source,
                changes=self._changes,
                num_replicas=wanted,
                needed=latest.needed if latest else wanted,
                reason=latest.reason.value if latest else "",
                why=latest.why if latest else "",
                num_failures=self._num_failures,
            )
        )


def fleet_load(context: AutoscalingContext) -> FleetLoad:
    """Gives what the replicas have reported, together; those that have not yet count as idle."""
    metrics = context.aggregated_metrics or {}
    values = {name: [float(value) for value in metrics.get(name, {}).values()] for name in (*SUMS, *MEANS, *SPEEDS)}
    known = {name: [value for value in values[name] if value > 0] for name in SPEEDS}
    return FleetLoad(
        num_replicas=context.current_num_replicas,
        waiting_elsewhere=float(context.total_queued_requests or 0.0),
        **{name: sum(values[name]) for name in SUMS},
        **{name: _mean(values[name]) for name in MEANS},
        **{name: _mean(known[name]) for name in SPEEDS if known[name]},
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
