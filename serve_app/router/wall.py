"""What the pit wall shows: the fleet at a glance, looked up at most once a second however many watch."""

import asyncio
import re
import time
from collections.abc import Iterable
from contextvars import Context
from dataclasses import asdict, dataclass, field
from typing import Any

from serve_app.messages import CommittedVersion, FleetStatus, PauseLease, ReplicaReport
from serve_app.router.fleet import Fleet
from serve_app.router.numbers import RouterNumbers
from serve_app.scaling_report import ScalingChange

LOOK_INTERVAL_S = 1.0
"""Between two looks; replicas report as often."""
MAX_SWAPS = 12
"""Of the history; more than a screen shows."""
MAX_CHANGES = 6
"""Of the number of replicas."""
HISTOGRAMS = {
    "first_token": "pitstop_time_to_first_token_seconds",
    "between_tokens": "pitstop_inter_token_seconds",
}
NUMBERS = {
    "work_s": "pitstop_work_seconds",
    "work_target_s": "pitstop_work_target_seconds",
    "swaps": "pitstop_swaps_total",
}
SERIES = re.compile(r"^(?P<name>\w+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")
BOUND = re.compile(r'(?:^|,)le="([^"]+)"')
OUTCOME = re.compile(r'(?:^|,)outcome="([^"]+)"')


@dataclass(frozen=True, slots=True)
class WallReplica:
    """One replica, as it reported last. reported_at: on the router's clock, in seconds since 1970."""

    name: str
    version: int
    state: str
    running: int
    waiting: int
    kv_usage: float
    generated_tokens: int
    reported_at: float
    error: str | None
    ranks: int


@dataclass(frozen=True, slots=True)
class WallSwap:
    """A line of the history. Where the weights came from and who asked is for holders of the admin key alone."""

    version: int
    label: str
    committed_at: str
    rollback_to: int | None
    strategy: str | None = None
    replicas: int = 0
    phases_s: dict[str, float] = field(default_factory=dict)
    paused_s: float = 0.0
    total_s: float = 0.0
    lagging: int = 0
    replaced: int = 0


@dataclass(frozen=True, slots=True)
class WallFailure:
    """A swap that was not committed. Its error, which may name folders, is for holders of the admin key."""

    at: str
    label: str
    reason: str
    was_rolled_back: bool


@dataclass(frozen=True, slots=True)
class WallPause:
    """A leased pause of the fleet, without the id that would end it."""

    remaining_s: float
    lease_s: float


@dataclass(frozen=True, slots=True)
class WallScaling:
    """One change of the number of replicas. at: seconds since 1970; reason: one sentence."""

    at: float
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram since the start: how many observations were at most each bound, in seconds; None is no bound."""

    bounds: list[float | None] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WallNumbers:
    """What the metrics of the fleet say, added up. swaps: how many were asked for, by outcome."""

    work_s: float = 0.0
    work_target_s: float = 0.0
    swaps: dict[str, float] = field(default_factory=dict)
    latencies: dict[str, Buckets] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WallData:
    """`GET /wall/data`. at: seconds since 1970, on the router's clock."""

    at: float
    model: str
    version: int
    label: str
    swap_in_progress: str | None
    phase: str | None
    problem: str | None
    pauses: list[WallPause]
    replicas: list[WallReplica]
    swaps: list[WallSwap]
    failures: list[WallFailure]
    numbers: WallNumbers
    scaling: list[WallScaling]


class Wall:
    """Asks controller and fleet for all who watch. For one event loop."""

    def __init__(self, fleet: Fleet, numbers: RouterNumbers, *, model: str) -> None:
        self._fleet = fleet
        self._numbers = numbers
        self._model = model
        self._looking: asyncio.Task[dict[str, Any]] | None = None
        self._looked_at = float("-inf")

    async def look(self) -> dict[str, Any]:
        """Gives what is known, no older than a second, as JSON. Raises NoReplica where the controller is away."""
        looking = self._looking
        if looking is None or (looking.done() and self._is_stale(looking)):
            self._looked_at = asyncio.get_running_loop().time()
            # In an empty context, because Ray Serve ends calls made for a request together with it.
            self._looking = looking = asyncio.get_running_loop().create_task(self._look(), context=Context())
        return await asyncio.shield(looking)

    def _is_stale(self, looked: asyncio.Task[dict[str, Any]]) -> bool:
        is_old = asyncio.get_running_loop().time() - self._looked_at >= LOOK_INTERVAL_S
        return is_old or looked.cancelled() or looked.exception() is not None

    async def _look(self) -> dict[str, Any]:
        status, pages = await asyncio.gather(self._fleet.status(), self._fleet.metrics())
        numbers = read_numbers([self._numbers.exposition(), *pages])
        return asdict(wall_data(status, numbers, model=self._model, now=time.time()))


def wall_data(status: FleetStatus, numbers: WallNumbers, *, model: str, now: float) -> WallData:
    """Gives what everybody may see of a status."""
    newest = status.history[0] if status.history else CommittedVersion(status.committed.version)
    return WallData(
        at=now,
        model=model,
        version=status.committed.version,
        label=newest.label,
        swap_in_progress=status.swap_in_progress,
        phase=status.phase,
        problem=status.problem,
        pauses=[_pause(lease) for lease in status.pauses],
        replicas=[_replica(report, now) for report in status.replicas],
        swaps=[_swap(version) for version in status.history[:MAX_SWAPS]],
        failures=[WallFailure(one.at, one.label, one.reason, one.was_rolled_back) for one in status.failures],
        numbers=numbers,
        scaling=[_change(change) for change in (status.scaling.changes if status.scaling else ())[:MAX_CHANGES]],
    )


def read_numbers(pages: Iterable[str]) -> WallNumbers:
    """Gives what Prometheus texts of all parts of the fleet say, each part once."""
    work, target, swaps = 0.0, 0.0, dict[str, float]()
    counts: dict[str, dict[str, float]] = {f"{name}_bucket": {} for name in HISTOGRAMS.values()}
    for match in _series(pages):
        name, labels, value = match["name"], match["labels"] or "", float(match["value"])
        if name in counts and (bound := BOUND.search(labels)):
            counts[name][bound[1]] = counts[name].get(bound[1], 0.0) + value
        elif name == NUMBERS["work_target_s"]:
            target = max(target, value)
        elif name == NUMBERS["swaps"] and (outcome := OUTCOME.search(labels)):
            swaps[outcome[1]] = swaps.get(outcome[1], 0.0) + value
        elif name == NUMBERS["work_s"]:
            work += value
    return WallNumbers(
        work_s=work,
        work_target_s=target,
        swaps=swaps,
        latencies={name: _buckets(counts[f"{family}_bucket"]) for name, family in HISTOGRAMS.items()},
    )


def _series(pages: Iterable[str]) -> Iterable[re.Match[str]]:
    """Each series once: the router that is asked is among those that answer."""
    seen: set[str] = set()
    for page in pages:
        for line in page.splitlines():
            # A line that starts otherwise is not looked at closely: there are thousands.
            if line.startswith(PREFIXES) and (match := SERIES.match(line)):
                key = line.rpartition(" ")[0]
                if key not in seen:
                    seen.add(key)
                    yield match


PREFIXES = (*NUMBERS.values(), *HISTOGRAMS.values())


def _buckets(counts: dict[str, float]) -> Buckets:
    ordered = sorted(counts.items(), key=lambda entry: float(entry[0]))
    bounds = [None if bound == "+Inf" else float(bound) for bound, _ in ordered]
    return Buckets(bounds, [count for _, count in ordered])


def _replica(report: ReplicaReport, now: float) -> WallReplica:
    return WallReplica(
        name=report.replica_id,
        version=report.version,
        state=report.state,
        running=report.num_running,
        waiting=report.num_waiting,
        kv_usage=report.kv_usage,
        generated_tokens=report.generated_tokens,
        reported_at=now - report.age_s,
        error=report.error,
        ranks=report.num_ranks,
    )


def _pause(lease: PauseLease) -> WallPause:
    return WallPause(lease.remaining_s, lease.lease_s)


def _change(change: ScalingChange) -> WallScaling:
    return WallScaling(change.at, change.before, change.after, change.why)


def _swap(version: CommittedVersion) -> WallSwap:
    shown = WallSwap(version.version, version.label, version.committed_at, version.rollback_to)
    if (result := version.result) is None:
        return shown
    return WallSwap(
        shown.version,
        shown.label,
        shown.committed_at,
        shown.rollback_to,
        strategy=result.strategy,
        replicas=len(result.replicas),
        phases_s=result.phases_s,
        paused_s=result.paused_s,
        total_s=result.total_s,
        lagging=len(result.lagging),
        replaced=len(result.replaced),
    )
