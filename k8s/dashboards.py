"""The Grafana dashboards, as rows of panels; `make manifests` writes them to `configs/grafana/`.

In an expression `@name` and `@name{labels}` stand for the metric of the jobs that are chosen above the panels.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

METRIC = re.compile(r"@(\w+)(?:\{([^}]*)\})?")
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GRID_COLUMNS = 24
ROW_HEIGHT = 8
RATE = "[$__rate_interval]"
SECONDS, SHARE, COUNT, PER_SECOND, REQUESTS = "s", "percentunit", "short", "ops", "reqps"
SERVER_FAULTS = "internal_error|generation_failed|deadline_exceeded|poison_request|no_replica|replica_.*|engine_.*"
"""The codes of errors that are no fault of who asked for an answer, as the alert has them."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. queries: legend and expression."""

    title: str
    unit: str
    description: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    bad_from: float | None = None
    """Value from which on a stat is red."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Rows of panels, each with its title."""

    uid: str
    title: str
    description: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def _quantiles(name: str, *wanted: float, by: str = "") -> tuple[tuple[str, str], ...]:
    labels = f"le, {by}" if by else "le"
    suffix = f" {{{{{by}}}}}" if by else ""
    return tuple(
        (f"p{100 * share:g}{suffix}", f"histogram_quantile({share}, sum by ({labels}) (rate(@{name}_bucket{RATE})))")
        for share in wanted
    )


def _by(label: str, name: str, function: str = "rate") -> tuple[tuple[str, str], ...]:
    return ((f"{{{{{label}}}}}", f"sum by ({label}) ({function}(@{name}{RATE}))"),)


def _each(expression: str) -> tuple[tuple[str, str], ...]:
    return (("replica {{replica}}", expression),)


OVERVIEW = Dashboard(
    "pitstop-overview",
    "Pitstop: fleet overview",
    "Whether clients are served, how fast, and by how many replicas.",
    (
        (
            "Now",
            (
                Panel(
                    "Ready replicas",
                    COUNT,
                    "Replicas that serve the committed weights.",
                    (("ready", '@pitstop_replicas{state="ready"}'),),
                    "stat",
                ),
                Panel(
                    "Committed weights",
                    COUNT,
                    "The version that every replica has to serve.",
                    (("version", "max(@pitstop_committed_weight_version)"),),
                    "stat",
                ),
                Panel(
                    "Waiting for a first token",
                    COUNT,
                    "Requests at the routers without a token yet.",
                    (("waiting", "sum(@pitstop_requests_waiting_at_router)"),),
                    "stat",
                ),
                Panel(
                    "Errors",
                    SHARE,
                    "Answers and streams that ended in an error of the server, of all answers.",
                    (
                        (
                            "errors",
                            f'sum(rate(@pitstop_refusals_total{{code=~"{SERVER_FAULTS}"}}[5m]))'
                            ' / sum(rate(@pitstop_http_requests_total{route=~"/v1/.*"}[5m])) or vector(0)',
                        ),
                    ),
                    "stat",
                    0.05,
                ),
            ),
        ),
        (
            "What clients see",
            (
                Panel(
                    "Answers by status",
                    REQUESTS,
                    "HTTP answers a second.",
                    _by("status", "pitstop_http_requests_total"),
                ),
                Panel(
                    "Time to first token",
                    SECONDS,
                    "From arrival at a router to the first token, the wait in line included.",
                    _quantiles("pitstop_time_to_first_token_seconds", 0.5, 0.95, 0.99),
                ),
                Panel(
                    "Time per token",
                    SECONDS,
                    "Mean time of a request's tokens after the first.",
                    _quantiles("pitstop_time_per_output_token_seconds", 0.5, 0.95, 0.99),
                ),
                Panel(
                    "Whole answers",
                    SECONDS,
                    "From arrival at a router to the last token, the wait in line included.",
                    _quantiles("pitstop_generation_seconds", 0.5, 0.95, 0.99),
                ),
                Panel(
                    "Errors by code",
                    REQUESTS,
                    "Errors answered a second, by the code in the answer.",
                    _by("code", "pitstop_refusals_total"),
                ),
                Panel(
                    "Duration by route",
                    SECONDS,
                    "Of 95 % of the HTTP requests, streams included.",
                    _quantiles("pitstop_http_request_seconds", 0.95, by="route"),
                ),
            ),
        ),
        (
            "Load",
            (
                Panel(
                    "Requests",
                    COUNT,
                    "Over all replicas and routers.",
                    (
                        ("running", "sum(@pitstop_requests_running)"),
                        ("waiting at replicas", "sum(@pitstop_requests_waiting)"),
                        ("in line at routers", "sum(@pitstop_requests_in_line)"),
                        ("HTTP in flight", "sum(@pitstop_http_requests_in_flight)"),
                    ),
                ),
                Panel(
                    "Tokens",
                    PER_SECOND,
                    "Tokens a second, over all replicas.",
                    (
                        ("generated", f"sum(rate(@pitstop_generated_tokens_total{RATE}))"),
                        ("prompt", f"sum(rate(@pitstop_prompt_tokens_total{RATE}))"),
                        ("prompt, from cache", f"sum(rate(@pitstop_cached_prompt_tokens_total{RATE}))"),
                    ),
                ),
                Panel(
                    "Ended by reason",
                    REQUESTS,
                    "Requests that ended, a second.",
                    _by("finish_reason", "pitstop_requests_total"),
                ),
            ),
        ),
    ),
)

ENGINE = Dashboard(
    "pitstop-engine",
    "Pitstop: engine",
    "What the generation loop of each replica does, and what its cache of keys and values holds.",
    (
        (
            "Loop",
            (
                Panel("Loops alive", COUNT, "1 while the generation loop runs.", _each("@pitstop_engine_alive")),
                Panel(
                    "Mean step",
                    SECONDS,
                    "Duration of a step.",
                    _each(f"rate(@pitstop_step_seconds_total{RATE}) / rate(@pitstop_steps_total{RATE})"),
                ),
                Panel(
                    "Latest step",
                    SECONDS,
                    "Duration of the latest step at each scrape.",
                    _each("@pitstop_last_step_seconds"),
                ),
                Panel("Steps", PER_SECOND, "Steps a second.", _each(f"rate(@pitstop_steps_total{RATE})")),
                Panel(
                    "Where a step goes",
                    SHARE,
                    "Share of the time that the loop stands in each phase of a step.",
                    (("{{phase}}", f"avg by (phase) (rate(@pitstop_step_phase_seconds_total{RATE}))"),),
                ),
                Panel(
                    "Between two deliveries",
                    SECONDS,
                    "Over the tokens of the later one.",
                    _quantiles("pitstop_inter_token_seconds", 0.5, 0.95, 0.99),
                ),
            ),
        ),
        (
            "Requests",
            (
                Panel("Running", COUNT, "Requests that the engine computes.", _each("@pitstop_requests_running")),
                Panel("Waiting", COUNT, "Requests in the engine's queue.", _each("@pitstop_requests_waiting")),
                Panel(
                    "Time in the engine's queue",
                    SECONDS,
                    "From arrival at the engine, after the router's line, to the first step.",
                    _quantiles("pitstop_replica_queue_seconds", 0.5, 0.95, 0.99),
                ),
                Panel(
                    "First token at the replica",
                    SECONDS,
                    "From arrival at a replica, after the router's line, to the first token.",
                    _quantiles("pitstop_replica_first_token_seconds", 0.5, 0.95, 0.99),
                ),
                Panel(
                    "Answers at the replica",
                    SECONDS,
                    "From arrival at a replica, after the router's line, to the last token.",
                    _quantiles("pitstop_replica_generation_seconds", 0.5, 0.95, 0.99),
                ),
                Panel(
                    "Prompts",
                    COUNT,
                    "Tokens of the prompts of ended requests.",
                    _quantiles("pitstop_request_prompt_tokens", 0.5, 0.95),
                ),
                Panel(
                    "Answers",
                    COUNT,
                    "Tokens that ended requests have generated.",
                    _quantiles("pitstop_request_generated_tokens", 0.5, 0.95),
                ),
                Panel(
                    "Measured speed",
                    PER_SECOND,
                    "Tokens a second, moving average over busy steps.",
                    (
                        ("prompts {{replica}}", "@pitstop_prefill_tokens_per_second"),
                        ("decoding {{replica}}", "@pitstop_decode_tokens_per_second"),
                    ),
                ),
            ),
        ),
        (
            "Keys and values",
            (
                Panel(
                    "Cache held by requests",
                    SHARE,
                    "Share of blocks that requests hold.",
                    _each("@pitstop_kv_usage_ratio"),
                ),
                Panel(
                    "Blocks",
                    COUNT,
                    "All, held by requests, holding a reusable prefix, on the host.",
                    (
                        ("all", "sum(@pitstop_kv_blocks)"),
                        ("held", "sum(@pitstop_kv_blocks_used)"),
                        ("prefixes", "sum(@pitstop_kv_blocks_cached)"),
                        ("on the host", "sum(@pitstop_kv_blocks_on_host)"),
                    ),
                ),
                Panel(
                    "Prefix hits",
                    SHARE,
                    "Share of prompt tokens that the cache had.",
                    _each(
                        f"rate(@pitstop_cached_prompt_tokens_total{RATE}) / rate(@pitstop_prompt_tokens_total{RATE})"
                    ),
                ),
                Panel(
                    "Preemptions",
                    PER_SECOND,
                    "Requests put back for want of blocks, a second.",
                    _each(f"rate(@pitstop_preemptions_total{RATE})"),
                ),
                Panel(
                    "Evictions",
                    PER_SECOND,
                    "Prefixes that made room, in blocks a second.",
                    _each(f"rate(@pitstop_kv_blocks_evicted_total{RATE})"),
                ),
                Panel(
                    "Host tier",
                    PER_SECOND,
                    "Blocks a second that go to the host and come back.",
                    (
                        ("out {{replica}}", f"rate(@pitstop_kv_blocks_offloaded_total{RATE})"),
                        ("back {{replica}}", f"rate(@pitstop_kv_blocks_restored_total{RATE})"),
                    ),
                ),
            ),
        ),
    ),
)

WEIGHTS = Dashboard(
    "pitstop-weights",
    "Pitstop: live weights",
    "Which weights the fleet serves, and what swaps cost.",
    (
        (
            "Versions",
            (
                Panel(
                    "Committed version",
                    COUNT,
                    "The version that every replica has to serve.",
                    (("committed", "max(@pitstop_committed_weight_version)"),),
                    "stat",
                ),
                Panel(
                    "Version skew",
                    COUNT,
                    "Highest less lowest version over the replicas; above 0 only while a swap commits.",
                    (("skew", "max(@pitstop_weight_version) - min(@pitstop_weight_version)"),),
                    "stat",
                    1,
                ),
                Panel(
                    "Version by replica",
                    COUNT,
                    "A replica that lags behind the committed version is fenced from routing.",
                    (*_each("@pitstop_weight_version"), ("committed", "max(@pitstop_committed_weight_version)")),
                ),
            ),
        ),
        (
            "Swaps",
            (
                Panel(
                    "Swaps by outcome",
                    COUNT,
                    "Swaps and rollbacks asked for in the interval.",
                    _by("outcome", "pitstop_swaps_total", "increase"),
                ),
                Panel(
                    "Pause of a swap",
                    SECONDS,
                    "Longest time that a replica stood still.",
                    _quantiles("pitstop_swap_pause_seconds", 0.5, 0.99),
                ),
                Panel(
                    "Staging of a swap",
                    SECONDS,
                    "Reading and checking new weights on the whole fleet, outside the pause.",
                    _quantiles("pitstop_swap_stage_seconds", 0.5, 0.99),
                ),
                Panel(
                    "Share of time paused",
                    SHARE,
                    "Of each replica's generation loop.",
                    _each(f"rate(@pitstop_paused_seconds_total{RATE})"),
                ),
                Panel("Paused now", COUNT, "1 while the generation loop is paused.", _each("@pitstop_engine_paused")),
                Panel(
                    "Phases of a swap",
                    SECONDS,
                    "Of 95 % of the committed swaps.",
                    _quantiles("pitstop_swap_phase_seconds", 0.95, by="phase"),
                ),
                Panel(
                    "Failures by reason",
                    COUNT,
                    "Swaps that were not committed, in the interval.",
                    _by("reason", "pitstop_swap_failures_total", "increase"),
                ),
                Panel(
                    "Weights read",
                    "Bps",
                    "By replicas for committed swaps, bytes a second.",
                    (("read", f"rate(@pitstop_swap_bytes_total{RATE})"),),
                ),
                Panel(
                    "Behind the committed version",
                    SECONDS,
                    "For how long some replica has been behind.",
                    (("behind", "max(@pitstop_weight_skew_seconds)"),),
                ),
                Panel(
                    "Leased pauses",
                    COUNT,
                    "Pauses of the fleet that are held from outside.",
                    (("leases", "sum(@pitstop_pause_leases)"),),
                ),
                Panel(
                    "Commits by replica",
                    COUNT,
                    "Versions committed in the interval.",
                    _each(f"increase(@pitstop_weight_commits_total{RATE})"),
                ),
            ),
        ),
        (
            "Tokens",
            (
                Panel(
                    "Tokens by age of their weights",
                    PER_SECOND,
                    "Tokens handed out a second, by how many versions behind the committed one their weights were.",
                    (("{{behind}} behind", f"sum by (behind) (rate(@pitstop_version_tokens_total{RATE}))"),),
                ),
                Panel(
                    "Staleness of tokens",
                    COUNT,
                    "Versions behind the committed one when the request ended, over tokens.",
                    _quantiles("pitstop_token_staleness_versions", 0.5, 0.95),
                ),
                Panel(
                    "Refused for their version",
                    REQUESTS,
                    "Requests whose weight version was not there, a second.",
                    _by("outcome", "pitstop_version_refusals_total"),
                ),
            ),
        ),
    ),
)

ROUTER = Dashboard(
    "pitstop-router",
    "Pitstop: router and autoscaling",
    "Where requests go, what is refused, and whether there are enough replicas.",
    (
        (
            "Routing",
            (
                Panel(
                    "Choices of a replica",
                    PER_SECOND,
                    "A second; fallback means that the policy failed.",
                    _by("reason", "pitstop_routing_decisions_total"),
                ),
                Panel(
                    "Prefixes found",
                    PER_SECOND,
                    "Prompt tokens a second that the chosen replica was expected to have cached, and that it had.",
                    _by("kind", "pitstop_routing_hit_tokens_total"),
                ),
                Panel(
                    "Admission",
                    REQUESTS,
                    "Requests a second by what became of them before they were sent.",
                    _by("outcome", "pitstop_admissions_total"),
                ),
                Panel(
                    "Waiting at the routers",
                    COUNT,
                    "Requests without a first token, of those the ones in line, and those that wait for weights to come"
                    " before they are in line.",
                    (
                        ("router {{router}}", "@pitstop_requests_waiting_at_router"),
                        ("router {{router}}, in line", "@pitstop_requests_in_line"),
                        ("router {{router}}, for weights", "@pitstop_requests_waiting_for_weights"),
                    ),
                ),
                Panel(
                    "Wait for the first step",
                    SECONDS,
                    "From arrival at a router until a replica begins: the line, and the replica's own queue.",
                    _quantiles("pitstop_queue_seconds", 0.5, 0.95, 0.99),
                ),
                Panel(
                    "In flight at the routers",
                    COUNT,
                    "HTTP requests being answered.",
                    (("router {{router}}", "@pitstop_http_requests_in_flight"),),
                ),
                Panel(
                    "Refusals", REQUESTS, "Errors answered a second, by code.", _by("code", "pitstop_refusals_total")
                ),
                Panel(
                    "Work of each replica",
                    SECONDS,
                    "Estimated seconds of queued and running work; even lines mean good balance.",
                    _each("@pitstop_work_seconds"),
                ),
                Panel(
                    "Queued tokens",
                    COUNT,
                    "Prompt tokens still to be computed, and the most that may be generated.",
                    (
                        ("prompts {{replica}}", "@pitstop_queued_prefill_tokens"),
                        ("decoding {{replica}}", "@pitstop_pending_decode_tokens"),
                    ),
                ),
            ),
        ),
        (
            "Scaling",
            (
                Panel(
                    "Replicas by state",
                    COUNT,
                    "As the controller knows them.",
                    (("{{state}}", "sum by (state) (@pitstop_replicas)"),),
                ),
                Panel(
                    "Decisions of scaling",
                    COUNT,
                    "Changes of the number of replicas in the interval, by what decided.",
                    (
                        (
                            "{{direction}} {{reason}}",
                            f"sum by (direction, reason) (increase(@pitstop_scaling_decisions_total{RATE}))",
                        ),
                    ),
                ),
                Panel(
                    "Replicas that the work asks for",
                    COUNT,
                    "Work of the fleet over the target of one replica, beside those alive.",
                    (
                        ("asked for", "sum(@pitstop_work_seconds) / max(@pitstop_work_target_seconds)"),
                        ("wanted", "max(@pitstop_replicas_wanted)"),
                        ("alive", "sum(@pitstop_engine_alive)"),
                    ),
                ),
                Panel(
                    "Starts and losses",
                    COUNT,
                    "Replicas that came, could not take the weights, or went without scaling, in the interval.",
                    (
                        ("started", f"increase(@pitstop_replica_starts_total{RATE})"),
                        ("failed", f"increase(@pitstop_replica_start_failures_total{RATE})"),
                        ("lost", f"increase(@pitstop_replica_losses_total{RATE})"),
                    ),
                ),
                Panel(
                    "Heartbeats without an answer",
                    PER_SECOND,
                    "Of the controller, a second.",
                    _each(f"rate(@pitstop_heartbeat_failures_total{RATE})"),
                ),
            ),
        ),
    ),
)

DASHBOARDS = {"overview": OVERVIEW, "engine": ENGINE, "weights": WEIGHTS, "router": ROUTER}


def render(dashboard: Dashboard) -> str:
    """Gives the dashboard as Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in dashboard.rows:
        position = {"x": 0, "y": y, "w": GRID_COLUMNS, "h": 1}
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": position, "panels": []})
        y += 1
        columns = 4 if row[0].kind == "stat" and len(row) > 3 else 3
        width = GRID_COLUMNS // columns
        for index, panel in enumerate(row):
            line, column = divmod(index, columns)
            panels.append(_panel(panel, {"x": column * width, "y": y + line * ROW_HEIGHT, "w": width, "h": ROW_HEIGHT}))
        y += ROW_HEIGHT * ((len(row) + columns - 1) // columns)
    for number, rendered in enumerate(panels, start=1):
        rendered["id"] = number
    return json.dumps(_frame(dashboard, panels), indent=1) + "\n"


def _frame(dashboard: Dashboard, panels: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["pitstop"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "title": "Pitstop", "tags": ["pitstop"], "asDropdown": True}],
        "templating": {"list": [_datasource_variable(), _job_variable()]},
        "annotations": {"list": [_commits()]},
        "panels": panels,
    }


def _panel(panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.bad_from is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.bad_from}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    shown = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": shown if panel.kind == "timeseries" else {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "expr": _chosen(expression),
                "legendFormat": legend,
                "datasource": DATASOURCE,
            }
            for index, (legend, expression) in enumerate(panel.queries)
        ],
    }


def _chosen(expression: str) -> str:
    """The expression with the chosen jobs in every selector."""
    return METRIC.sub(lambda found: f'{found[1]}{{job=~"$job"{", " + found[2] if found[2] else ""}}}', expression)


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}


def _job_variable() -> dict[str, Any]:
    return {
        "name": "job",
        "label": "Job",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(pitstop_committed_weight_version, job)", "refId": "job"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".+",
        "current": {},
    }


def _commits() -> dict[str, Any]:
    return {
        "name": "Weights committed",
        "enable": True,
        "iconColor": "purple",
        "datasource": DATASOURCE,
        "expr": _chosen("changes(max(@pitstop_committed_weight_version)[1m:]) > 0"),
        "titleFormat": "weights committed",
    }
