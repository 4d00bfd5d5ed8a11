"""Counts what the autoscaling policy has decided, each change once however often it is told."""

from itertools import product

from serve_app.metrics import Recorder
from serve_app.scaling.decision import ScalingReason
from serve_app.scaling_report import ScalingChange, ScalingReport

DECISIONS = "pitstop_scaling_decisions_total"
FAILURES = "pitstop_scaling_failures_total"

WANTED = "pitstop_replicas_wanted"


class ScalingMeter:
    """Keeps the latest report. For one event loop."""

    def __init__(self, recorder: Recorder, *, num_replicas: int) -> None:
        """num_replicas: what is wanted before the policy has said anything, and for good where there is none."""
        self._recorder = recorder
        self._num_counted = 0
        self._num_failures = 0
        self.report: ScalingReport | None = None
        # From zero, so that the first one is a rise.
        recorder.count(FAILURES, amount=0)
        for direction, reason in product(("up", "down"), ScalingReason):
            recorder.count(DECISIONS, direction, reason.value, amount=0)
        recorder.set_gauge(WANTED, value=num_replicas)

    def take(self, report: ScalingReport) -> tuple[ScalingChange, ...]:
        """Takes the latest report, and gives its changes that are news.

        One from a policy that was started anew begins to count again.
        """
        if self.report is not None and self.report.source != report.source:
            self._num_counted = self._num_failures = 0
        news = tuple(change for change in report.changes if change.number > self._num_counted)
        for change in news:
            self._recorder.count(DECISIONS, change.direction, change.reason)
        self._num_counted = max((change.number for change in report.changes), default=0)
        self._recorder.count(FAILURES, amount=max(0, report.num_failures - self._num_failures))
        self._num_failures = report.num_failures
        self._recorder.set_gauge(WANTED, value=report.num_replicas)
        self.report = report
        return news
