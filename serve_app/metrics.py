"""One table of every metric the application exposes, and the few functions that turn numbers into Prometheus text.

A replica is labelled by its rank, 0 to n-1, not by its id: a replica that replaces another takes its rank, so the
series stay bounded and a restart is an ordinary counter reset.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""From one step of a small model to the longest stream a client waits for."""
PAUSE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Around the 20 ms that an exchange of storages may take."""

STALENESS_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0)
"""Versions; off-policy training seldom uses what is older."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row of the table. `stat` names the field of EngineStats it shows; None is counted where it happens."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    stat: str | None = None
    buckets: tuple[float, ...] = LATENCY_BUCKETS_S


def _gauge(name: str, stat: str, help_text: str) -> MetricSpec:
    return MetricSpec(name, "gauge", help_text, ("replica",), stat)


def _counter(name: str, stat: str, help_text: str) -> MetricSpec:
    return MetricSpec(name, "counter", help_text, ("replica",), stat)


ENGINE_METRICS = (
    _gauge("pitstop_engine_alive", "is_alive", "1 while the generation loop runs."),
    _gauge("pitstop_engine_paused", "is_paused", "1 while the generation loop is paused."),
    _gauge("pitstop_requests_waiting", "num_waiting", "Requests that wait in the engine's queue."),
    _gauge("pitstop_requests_running", "num_running", "Requests that the engine computes."),
    _gauge("pitstop_queued_prefill_tokens", "queued_prefill_tokens", "Prompt tokens still to be computed."),
    _gauge("pitstop_pending_decode_tokens", "pending_decode_tokens", "Most tokens that running requests may generate."),
    _gauge("pitstop_kv_blocks", "num_blocks", "Blocks of the KV cache."),
    _gauge("pitstop_kv_blocks_used", "num_used_blocks", "Blocks that requests hold."),
    _gauge("pitstop_kv_blocks_cached", "num_cached_blocks", "Blocks that hold a reusable prefix."),
    _gauge("pitstop_kv_blocks_on_host", "num_host_blocks", "Blocks that the host tier holds."),
    _gauge("pitstop_kv_usage_ratio", "kv_usage", "Share of blocks that requests hold, 0 to 1."),
    _gauge("pitstop_prefill_tokens_per_second", "prefill_tokens_per_s", "Measured speed of prompts, moving average."),
    _gauge("pitstop_decode_tokens_per_second", "decode_tokens_per_s", "Measured speed of generation, moving average."),
    _gauge("pitstop_last_step_seconds", "last_step_s", "Duration of the latest step."),
    _gauge("pitstop_weight_version", "weight_version", "Weight version that the replica generates with."),
    _counter("pitstop_prompt_tokens_total", "prompt_tokens_total", "Prompt tokens of admitted requests."),
    _counter("pitstop_cached_prompt_tokens_total", "cached_tokens_total", "Prompt tokens taken from the prefix cache."),
    _counter("pitstop_generated_tokens_total", "generated_tokens_total", "Tokens generated."),
    _counter("pitstop_preemptions_total", "preemptions_total", "Requests put back for want of blocks."),
    _counter("pitstop_steps_total", "steps_total", "Steps of the generation loop."),
    _counter("pitstop_step_seconds_total", "step_seconds_total", "Seconds spent in steps."),
    _counter("pitstop_paused_seconds_total", "paused_seconds_total", "Seconds the generation loop was paused."),
    _counter("pitstop_weight_commits_total", "weight_swaps_total", "Weight versions committed on the replica."),
    MetricSpec(
        "pitstop_requests_total",
        "counter",
        "Requests that ended, by finish reason.",
        ("replica", "finish_reason"),
        "requests_total",
    ),
)
REPLICA_METRICS = (
    MetricSpec(
        "pitstop_time_to_first_token_seconds",
        "histogram",
        "From arrival at the replica to the first token.",
        ("replica",),
    ),
    MetricSpec(
        "pitstop_generation_seconds", "histogram", "From arrival at the replica to the last token.", ("replica",)
    ),
    MetricSpec(
        "pitstop_heartbeat_failures_total", "counter", "Heartbeats the controller did not answer.", ("replica",)
    ),
)
CONTROLLER_METRICS = (
    MetricSpec("pitstop_committed_weight_version", "gauge", "Weight version that every replica has to serve."),
    MetricSpec("pitstop_replicas", "gauge", "Replicas that report to the controller, by state.", ("state",)),
    MetricSpec(
        "pitstop_swaps_total",
        "counter",
        "Swaps and rollbacks asked for, by outcome; rolled_back failed at the commit.",
        ("outcome",),
    ),
    MetricSpec("pitstop_swap_stage_seconds", "histogram", "Time to stage new weights on the whole fleet."),
    MetricSpec(
        "pitstop_swap_pause_seconds", "histogram", "Longest pause of a replica in a swap.", buckets=PAUSE_BUCKETS_S
    ),
)
ROUTER_METRICS = (
    MetricSpec("pitstop_http_requests_total", "counter", "HTTP requests answered.", ("route", "status")),
    MetricSpec("pitstop_http_request_seconds", "histogram", "Duration of HTTP requests, streams included.", ("route",)),
    MetricSpec("pitstop_http_requests_in_flight", "gauge", "HTTP requests being answered."),
    MetricSpec(
        "pitstop_routing_decisions_total", "counter", "Choices of a replica; fallback is a failed policy.", ("outcome",)
    ),
    MetricSpec(
        "pitstop_version_tokens_total",
        "counter",
        "Tokens handed out, by the weight version that drew them; all but the newest few are older.",
        ("version",),
    ),
    MetricSpec(
        "pitstop_token_staleness_versions",
        "histogram",
        "Weight versions that each token was behind the committed one when its request ended.",
        buckets=STALENESS_BUCKETS,
    ),
    MetricSpec(
        "pitstop_version_refusals_total",
        "counter",
        "Requests refused for the weight version they asked for, by outcome.",
        ("outcome",),
    ),
)
METRICS = ENGINE_METRICS + REPLICA_METRICS + CONTROLLER_METRICS + ROUTER_METRICS
"""Every metric there is; dashboards and the README may name no other."""


class Recorder:
    """The counters, gauges and histograms of one process, in a registry of their own. Thread-safe.

    Labels are given by position, in the order of the table.
    """

    def __init__(self, specs: Sequence[MetricSpec]) -> None:
        # The creation time of every series would double the exposition and is of no use to a rate.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped upstream
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for spec in specs:
            self._register(spec)

    def count(self, name: str, *labels: str, amount: float = 1) -> None:
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(amount)

    def forget(self, name: str, *labels: str) -> None:
        """Ends the series of a counter, so that labels without bound do not add up."""
        self._counters[name].remove(*labels)

    def set_gauge(self, name: str, *labels: str, value: float) -> None:
        gauge = self._gauges[name]
        (gauge.labels(*labels) if labels else gauge).set(value)

    def observe(self, name: str, *labels: str, value: float) -> None:
        histogram = self._histograms[name]
        (histogram.labels(*labels) if labels else histogram).observe(value)

    def expose(self) -> str:
        """Gives everything recorded so far as Prometheus text."""
        return generate_latest(self._registry).decode()

    def _register(self, spec: MetricSpec) -> None:
        if spec.kind == "counter":
            self._counters[spec.name] = Counter(spec.name, spec.help, spec.labels, registry=self._registry)
        elif spec.kind == "gauge":
            self._gauges[spec.name] = Gauge(spec.name, spec.help, spec.labels, registry=self._registry)
        else:
            self._histograms[spec.name] = Histogram(
                spec.name, spec.help, spec.labels, registry=self._registry, buckets=spec.buckets
            )


def expose_engine(stats: EngineStats, *, replica: str) -> str:
    """Gives the numbers of one engine as Prometheus text, every series labelled with `replica`."""
    registry = CollectorRegistry()
    registry.register(_StatsCollector(stats, replica))
    return generate_latest(registry).decode()


def merge_expositions(expositions: Iterable[str]) -> str:
    """Gives one exposition out of several, each family once; of two samples with equal labels the first one stays."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, dict[str, str]] = {}
    for exposition in expositions:
        family = ""
        for line in exposition.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
            if line.startswith("#"):
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif line:
                series = line.rsplit(" ", 1)[0]
                samples.setdefault(family, {}).setdefault(series, line)
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, {}).values())]
    return "\n".join(lines) + "\n" if lines else ""


class _StatsCollector(Collector):
    """Reads one snapshot as the table says."""

    def __init__(self, stats: EngineStats, replica: str) -> None:
        self._stats = stats
        self._replica = replica

    def collect(self) -> Iterator[Metric]:
        for spec in ENGINE_METRICS:
            assert spec.stat is not None
            family_class = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            family = family_class(spec.name, spec.help, labels=spec.labels)
            value = getattr(self._stats, spec.stat)
            by_label = value.items() if isinstance(value, dict) else [(None, value)]
            for label, number in by_label:
                family.add_metric([self._replica] if label is None else [self._replica, str(label)], float(number))
            yield family
