"""One table of every metric the application exposes, and the few functions that turn numbers into Prometheus text.

A replica is labelled by a number from 0, not by its id: it keeps the number for as long as it lives, and one that
replaces it takes it over, so the series stay bounded and a restart is an ordinary counter reset. Routers are labelled
by their ranks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""From one step of a small model to the longest stream a client waits for."""
PAUSE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Around the 20 ms that an exchange of storages may take."""
TOKEN_LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
"""From a tiny model's step to the half second that a step on a CPU may take, and what a swap adds to it."""
LENGTH_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
"""Tokens of a prompt or an answer."""
BUCKETS: dict[str, tuple[float, ...]] = {
    "latency": LATENCY_BUCKETS_S,
    "token_latency": TOKEN_LATENCY_BUCKETS_S,
    "pause": PAUSE_BUCKETS_S,
    "length": LENGTH_BUCKETS,
}
"""By the name under which `metrics.buckets` of the settings replaces them."""
UNITS = frozenset(
    {"seconds", "tokens", "blocks", "bytes", "steps", "requests", "ratio", "version", "versions", "replicas", "swaps"}
    | {
        "leases",
        "commits",
        "starts",
        "losses",
        "failures",
        "preemptions",
        "decisions",
        "admissions",
        "refusals",
        "resumes",
    }
)
"""The words of names that say what is counted. A name without one is of what is true or not, 1 or 0."""
SPEED = "tokens_per_second"
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
    aliases: tuple[str, ...] = ()
    """Names of other systems under which the same numbers are shown."""

    @property
    def unit(self) -> str:
        """What is counted, as the last word of the name that is a unit says; "1" where none is."""
        if self.name.endswith(SPEED):
            return SPEED
        return next((word for word in reversed(self.name.split("_")) if word in UNITS), "1")


def _gauge(name: str, stat: str, help_text: str, *aliases: str) -> MetricSpec:
    return MetricSpec(name, "gauge", help_text, ("replica",), stat, aliases=aliases)


def _counter(name: str, stat: str, help_text: str, *aliases: str) -> MetricSpec:
    return MetricSpec(name, "counter", help_text, ("replica",), stat, aliases=aliases)


ENGINE_METRICS = (
    _gauge("pitstop_engine_alive", "is_alive", "1 while the generation loop runs."),
    _gauge("pitstop_engine_paused", "is_paused", "1 while the generation loop is paused."),
    _gauge(
        "pitstop_requests_waiting",
        "num_waiting",
        "Requests that wait in the engine's queue.",
        "vllm:num_requests_waiting",
    ),
    _gauge(
        "pitstop_requests_running", "num_running", "Requests that the engine computes.", "vllm:num_requests_running"
    ),
    _gauge("pitstop_queued_prefill_tokens", "queued_prefill_tokens", "Prompt tokens still to be computed."),
    _gauge("pitstop_pending_decode_tokens", "pending_decode_tokens", "Most tokens that running requests may generate."),
    _gauge("pitstop_kv_blocks", "num_blocks", "Blocks of the KV cache."),
    _gauge("pitstop_kv_block_tokens", "page_size", "Tokens that a block holds."),
    _gauge("pitstop_kv_blocks_used", "num_used_blocks", "Blocks that requests hold."),
    _gauge("pitstop_kv_blocks_cached", "num_cached_blocks", "Blocks that hold a reusable prefix."),
    _gauge("pitstop_kv_blocks_on_host", "num_host_blocks", "Blocks that the host tier holds."),
    _gauge(
        "pitstop_kv_usage_ratio", "kv_usage", "Share of blocks that requests hold, 0 to 1.", "vllm:kv_cache_usage_perc"
    ),
    _gauge("pitstop_prefill_tokens_per_second", "prefill_tokens_per_s", "Measured speed of prompts, moving average."),
    _gauge("pitstop_decode_tokens_per_second", "decode_tokens_per_s", "Measured speed of generation, moving average."),
    _gauge("pitstop_step_fixed_seconds", "fixed_step_s", "What every step takes, learned from the latest ones."),
    _gauge("pitstop_step_request_seconds", "request_step_s", "What each generating request adds to a step."),
    _gauge("pitstop_step_prompt_token_seconds", "token_step_s", "What each prompt token adds to a step."),
    _gauge("pitstop_step_max_tokens", "max_step_tokens", "Tokens that a step may compute now."),
    _gauge("pitstop_max_running_requests", "max_running", "Requests that the engine computes at once at most."),
    _gauge("pitstop_last_step_seconds", "last_step_s", "Duration of the latest step."),
    _gauge("pitstop_weight_version", "weight_version", "Weight version that the replica generates with."),
    _counter(
        "pitstop_prompt_tokens_total",
        "prompt_tokens_total",
        "Prompt tokens of admitted requests.",
        "vllm:prompt_tokens_total",
        "vllm:prefix_cache_queries_total",
    ),
    _counter(
        "pitstop_cached_prompt_tokens_total",
        "cached_tokens_total",
        "Prompt tokens taken from the prefix cache.",
        "vllm:prefix_cache_hits_total",
    ),
    _counter(
        "pitstop_generated_tokens_total", "generated_tokens_total", "Tokens generated.", "vllm:generation_tokens_total"
    ),
    _counter(
        "pitstop_preemptions_total",
        "preemptions_total",
        "Requests put back for want of blocks.",
        "vllm:num_preemptions_total",
    ),
    _counter("pitstop_kv_blocks_evicted_total", "evicted_blocks_total", "Cached blocks that made room for others."),
    _counter("pitstop_kv_blocks_offloaded_total", "offloaded_blocks_total", "Blocks copied to the host tier."),
    _counter("pitstop_kv_blocks_restored_total", "restored_blocks_total", "Blocks that came back from the host tier."),
    _counter("pitstop_steps_total", "steps_total", "Steps of the generation loop."),
    MetricSpec(
        "pitstop_step_phase_seconds_total",
        "counter",
        "Seconds the generation loop stood in each phase of its steps.",
        ("replica", "phase"),
        "step_phase_seconds_total",
    ),
    _counter("pitstop_step_seconds_total", "step_seconds_total", "Seconds spent in steps."),
    _counter("pitstop_paused_seconds_total", "paused_seconds_total", "Seconds the generation loop was paused."),
    _counter("pitstop_weight_commits_total", "weight_swaps_total", "Commits of new weights on the replica."),
    MetricSpec(
        "pitstop_requests_total",
        "counter",
        "Requests that ended, by finish reason.",
        ("replica", "finish_reason"),
        "requests_total",
        aliases=("vllm:request_success_total",),
    ),
)
REPLICA_METRICS = (
    MetricSpec(
        "pitstop_replica_first_token_seconds",
        "histogram",
        "From arrival at the replica, after the router's line, to the first token.",
        ("replica",),
    ),
    MetricSpec(
        "pitstop_replica_generation_seconds",
        "histogram",
        "From arrival at the replica, after the router's line, to the last token.",
        ("replica",),
    ),
    MetricSpec(
        "pitstop_replica_queue_seconds",
        "histogram",
        "From arrival at the engine, after the router's line, to the first step that computes the request.",
        ("replica",),
    ),
    MetricSpec(
        "pitstop_inter_token_seconds",
        "histogram",
        "Between two deliveries of a stream, over the tokens of the later one.",
        ("replica",),
        buckets=TOKEN_LATENCY_BUCKETS_S,
        aliases=("vllm:inter_token_latency_seconds",),
    ),
    MetricSpec(
        "pitstop_time_per_output_token_seconds",
        "histogram",
        "Mean time of a request's tokens after the first.",
        ("replica",),
        buckets=TOKEN_LATENCY_BUCKETS_S,
        aliases=("vllm:request_time_per_output_token_seconds",),
    ),
    MetricSpec(
        "pitstop_request_prompt_tokens",
        "histogram",
        "Tokens of the prompts of ended requests.",
        ("replica",),
        buckets=LENGTH_BUCKETS,
        aliases=("vllm:request_prompt_tokens",),
    ),
    MetricSpec(
        "pitstop_request_generated_tokens",
        "histogram",
        "Tokens that ended requests have generated.",
        ("replica",),
        buckets=LENGTH_BUCKETS,
        aliases=("vllm:request_generation_tokens",),
    ),
    MetricSpec(
        "pitstop_work_seconds",
        "gauge",
        "Estimated seconds of queued and running work, which scales the fleet.",
        ("replica",),
    ),
    MetricSpec(
        "pitstop_work_target_seconds", "gauge", "Work of a replica above which another is asked for.", ("replica",)
    ),
    MetricSpec(
        "pitstop_heartbeat_failures_total", "counter", "Heartbeats the controller did not answer.", ("replica",)
    ),
)
CONTROLLER_METRICS = (
    MetricSpec("pitstop_committed_weight_version", "gauge", "Weight version that every replica has to serve."),
    MetricSpec("pitstop_replicas", "gauge", "Replicas that report to the controller, by state.", ("state",)),
    MetricSpec("pitstop_replicas_wanted", "gauge", "Replicas that there should be."),
    MetricSpec(
        "pitstop_scaling_decisions_total",
        "counter",
        "Changes of the number of replicas, by direction and by what decided.",
        ("direction", "reason"),
    ),
    MetricSpec(
        "pitstop_scaling_failures_total", "counter", "Times the autoscaling policy failed and kept what there was."
    ),
    MetricSpec(
        "pitstop_swaps_total",
        "counter",
        "Swaps and rollbacks asked for, by outcome; rolled_back failed at the commit.",
        ("outcome",),
    ),
    MetricSpec(
        "pitstop_replica_starts_total",
        "counter",
        "Replicas that have started, each once; not those that a restarted controller finds serving.",
    ),
    MetricSpec(
        "pitstop_replica_losses_total",
        "counter",
        "Replicas silent for half a minute that were not scaled away: dead, ended or replaced, by a rollout too.",
    ),
    MetricSpec(
        "pitstop_replica_start_failures_total", "counter", "Replicas that could not take the committed weights."
    ),
    MetricSpec("pitstop_swap_failures_total", "counter", "Swaps that were not committed, by what failed.", ("reason",)),
    MetricSpec("pitstop_swap_phase_seconds", "histogram", "Duration of each phase of committed swaps.", ("phase",)),
    MetricSpec("pitstop_swap_bytes_total", "counter", "Bytes of weights that replicas read for committed swaps."),
    MetricSpec("pitstop_weight_skew_versions", "gauge", "Versions that the last replica is behind the committed one."),
    MetricSpec("pitstop_weight_skew_seconds", "gauge", "Time for which some replica has been behind."),
    MetricSpec("pitstop_pause_leases", "gauge", "Leased pauses of the fleet in force."),
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
        "pitstop_time_to_first_token_seconds",
        "histogram",
        "From arrival at the router to the first token of a prompt's answer.",
        aliases=("vllm:time_to_first_token_seconds",),
    ),
    MetricSpec(
        "pitstop_generation_seconds",
        "histogram",
        "From arrival at the router to the last token of a prompt's answers.",
        aliases=("vllm:e2e_request_latency_seconds",),
    ),
    MetricSpec(
        "pitstop_queue_seconds",
        "histogram",
        "From arrival at the router to the first step that computes the request: its line, and the replica's own.",
        aliases=("vllm:request_queue_time_seconds",),
    ),
    MetricSpec(
        "pitstop_admissions_total",
        "counter",
        "Requests by what became of them before they were sent: at_once, waited, left, expired, or refused.",
        ("outcome",),
    ),
    MetricSpec(
        "pitstop_queued_tokens_at_router", "gauge", "Tokens of prompts and expected answers in line at the router."
    ),
    MetricSpec("pitstop_requests_waiting_at_router", "gauge", "Requests that wait for their first token."),
    MetricSpec(
        "pitstop_requests_in_line",
        "gauge",
        "Requests in line at the router, sent to no replica yet.",
        aliases=("vllm:num_requests_waiting",),
    ),
    MetricSpec(
        "pitstop_requests_waiting_for_weights",
        "gauge",
        "Requests that wait, before the line, for a weight version that is yet to come.",
    ),
    MetricSpec(
        "pitstop_refusals_total", "counter", "Errors told to clients, also in streams, by their code.", ("code",)
    ),
    MetricSpec(
        "pitstop_routing_decisions_total",
        "counter",
        "Choices of a replica, by what decided; waited found none open, fallback is a failed policy.",
        ("reason",),
    ),
    MetricSpec(
        "pitstop_routing_hit_tokens_total",
        "counter",
        "Prompt tokens that the chosen replica was expected to have cached, and that it had.",
        ("kind",),
    ),
    MetricSpec(
        "pitstop_version_tokens_total",
        "counter",
        "Tokens handed out, by how many versions their weights were behind the committed ones: 0 to 3, or older.",
        ("behind",),
    ),
    MetricSpec(
        "pitstop_token_staleness_versions",
        "histogram",
        "Weight versions that each token was behind the committed one when its request ended.",
        buckets=STALENESS_BUCKETS,
    ),
    MetricSpec(
        "pitstop_resumes_total",
        "counter",
        "Attempts to go on with a request at another replica, by why its own could not.",
        ("reason",),
    ),
    MetricSpec(
        "pitstop_resume_seconds", "histogram", "From the loss of a replica to the next event of a stream it had."
    ),
    MetricSpec("pitstop_poison_requests_total", "counter", "Requests refused because replicas died of them."),
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

    Labels are given by position, in the order of the table. `constant` labels come before them in every series.
    """

    def __init__(
        self,
        specs: Sequence[MetricSpec],
        *,
        constant: Mapping[str, str] | None = None,
        buckets: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """buckets: other bounds of histograms, by the names of BUCKETS."""
        self._constant = dict(constant or {})
        self._buckets = {BUCKETS[name]: bounds for name, bounds in (buckets or {}).items()}
        # The creation time of every series would double the exposition and is of no use to a rate.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped upstream
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for spec in specs:
            self._register(spec)

    def count(self, name: str, *labels: str, amount: float = 1) -> None:
        counter, values = self._counters[name], (*self._constant.values(), *labels)
        (counter.labels(*values) if values else counter).inc(amount)

    def set_gauge(self, name: str, *labels: str, value: float) -> None:
        gauge, values = self._gauges[name], (*self._constant.values(), *labels)
        (gauge.labels(*values) if values else gauge).set(value)

    def observe(self, name: str, *labels: str, value: float, times: int = 1) -> None:
        histogram, values = self._histograms[name], (*self._constant.values(), *labels)
        series = histogram.labels(*values) if values else histogram
        for _ in range(times):
            series.observe(value)

    def expose(self) -> str:
        """Gives everything recorded so far as Prometheus text."""
        return generate_latest(self._registry).decode()

    def _register(self, spec: MetricSpec) -> None:
        labels = (*self._constant, *spec.labels)
        if spec.kind == "counter":
            self._counters[spec.name] = Counter(spec.name, spec.help, labels, registry=self._registry)
        elif spec.kind == "gauge":
            self._gauges[spec.name] = Gauge(spec.name, spec.help, labels, registry=self._registry)
        else:
            bounds = self._buckets.get(spec.buckets, spec.buckets)
            self._histograms[spec.name] = Histogram(
                spec.name, spec.help, labels, registry=self._registry, buckets=bounds
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
