"""What a process has recorded, copied to Ray's metrics agent, so that Ray's own Prometheus targets show it too.

Aggregated: once every few seconds, and of each histogram its sum and count as two counters, since Ray's histograms take
single observations only. A call of Ray's costs ten times one of prometheus-client's, so nothing is sent as it happens.
"""

import logging
import threading
import time
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from ray.util.metrics import Counter, Gauge

from serve_app.metrics import MetricSpec
from serve_app.settings import MetricsSettings

logger = logging.getLogger("ray.serve.pitstop")


def names_at_agent(spec: MetricSpec) -> list[str]:
    """Gives the names under which Ray's own page has a metric."""
    if spec.kind == "histogram":
        return [f"ray_{spec.name}{suffix}_total" for suffix in ("_sum", "_count")]
    return [f"ray_{spec.name}"]


def start_mirror(expose: Callable[[], str], settings: MetricsSettings) -> None:
    """Starts copying what `expose`, called in another thread, gives; does nothing where the settings want none."""
    if settings.ray_interval_s is not None:
        AgentMirror(expose, interval_s=settings.ray_interval_s).start()


class AgentMirror:
    """Copies one exposition to Ray's agent, in a thread of its own, until the process ends."""

    def __init__(self, expose: Callable[[], str], *, interval_s: float) -> None:
        self._expose = expose
        self._interval_s = interval_s
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._sent: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self._thread = threading.Thread(target=self._run, name="pitstop-ray-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def copy(self) -> None:
        """Sends gauges as they are and what counters have grown by."""
        for family in text_string_to_metric_families(self._expose()):
            for sample in family.samples:
                if family.type == "gauge":
                    self._set(sample)
                elif not sample.name.endswith("_bucket"):
                    self._grow(sample)

    def _run(self) -> None:
        is_failing = False
        while True:
            time.sleep(self._interval_s)
            try:
                self.copy()
                is_failing = False
            except Exception:
                # Numbers for an agent are never a reason to stop serving; `GET /metrics` has them all the same.
                if not is_failing:
                    logger.exception("event=ray_metrics_failed")
                is_failing = True

    def _set(self, sample: Sample) -> None:
        if sample.name not in self._gauges:
            self._gauges[sample.name] = Gauge(sample.name, tag_keys=tuple(sample.labels))
        self._gauges[sample.name].set(sample.value, tags=dict(sample.labels))

    def _grow(self, sample: Sample) -> None:
        key = (sample.name, frozenset(sample.labels.items()))
        grown = sample.value - self._sent.get(key, 0.0)
        if grown <= 0:
            return
        # Ray puts `_total` behind every counter itself.
        name = sample.name.removesuffix("_total")
        if name not in self._counters:
            self._counters[name] = Counter(name, tag_keys=tuple(sample.labels))
        self._counters[name].inc(grown, tags=dict(sample.labels))
        self._sent[key] = sample.value
