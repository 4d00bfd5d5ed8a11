"""Routing at scale, by simulation: what routes in `serve_app`, over replicas whose steps take what was measured.

    python -m benchmarks.fleet_sim                        # everything, about ten minutes on one core
    python -m benchmarks.fleet_sim --parts grid --workloads chat --utilisations 0.85
    python -m benchmarks.fleet_sim --replica gpu --parts grid

Workloads, rates and seeds are in `benchmarks/workloads`, kinds of replicas in its `replicas.yaml`. Prints tables, and
writes plots to `--plots`.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks import report
from benchmarks.fleet import decisions, plots
from benchmarks.fleet.routers import ROUTERS
from benchmarks.fleet.scaled import simulate_scaled
from benchmarks.fleet.simulation import Case, Outcome, simulate
from benchmarks.fleet.traffic import Scale, load, scales
from serve_app.scaling.decision import ScalingTargets

WORKLOADS = ("chat", "agents", "rollouts", "bursts")
PARTS = ("grid", "delays", "routers", "sizes", "crash", "rates", "scaling", "decision")
BASELINE = "power of two"
COMPARED = ("ours", "power of two", "cache-aware", "round robin", "oracle")
TURNS = {"chat": 120, "agents": 60, "rollouts": 500, "bursts": 120}
"""Requests for each replica: of rollouts many, because the longest take minutes and the fleet has to fill first."""
USUAL = Case("chat", "ours", 0.85)
SIZES = (8, 64, 512)
NUM_ROUTERS = (1, 4, 16, 64)
RATES = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
ATTAINED = (0.99, 0.95)
"""Shares of requests within their limits; the highest rate with them is what others call goodput (DistServe, 2024)."""
CRASHES_AT = (0.2, 0.35, 0.5, 0.85)
"""Shares of the run, each in another burst."""
DELAYS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def main() -> None:
    """Runs what was asked for, prints a table for each part."""
    arguments = _parse_arguments()
    scale = scales()[arguments.replica]
    print(report.machine())
    print(f"Command: python -m benchmarks.fleet_sim {' '.join(sys.argv[1:])}".rstrip())
    print(f"Replica: {scale}")
    for part in arguments.parts:
        if part == "scaling":
            _scale_up_and_down(arguments, scale)
            continue
        if part == "decision":
            print("\n## decision\n\n| replicas | p10 | p50 | p90 |\n|---|---|---|---|")
            for size in SIZES:
                shares = np.quantile(decisions.measure(size, scale), [0.1, 0.5, 0.9])
                print(f"| {size} | " + " | ".join(f"{share:.0f} us" for share in shares) + " |", flush=True)
            continue
        cases = _cases(part, arguments)
        print(f"\n## {part}\n\n{_HEADING}", flush=True)
        done: list[Outcome] = []
        for case in cases:
            outcome = simulate(case, scale)
            done.append(outcome)
            print(_line(outcome, _of(done, case, BASELINE), _of(done, case, "oracle")), flush=True)
        if part == "rates":
            print(_sustained(done))
        if arguments.plots is not None:
            plots.draw(part, done, arguments.plots, arguments.replica)


_HEADING = """\
| workload | use | replicas | routers | delay | router | first token p50 | p99 | to power of two | to the oracle | \
token p99 | good | goodput | to power of two | hits | imbalance | busy | decision p50, p99 |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def _line(outcome: Outcome, baseline: Outcome | None, oracle: Outcome | None) -> str:
    case = outcome.case
    p50, p99 = outcome.quantile(0.5), outcome.quantile(0.99)
    to_baseline = f"{p99 / baseline.quantile(0.99):.2f}x" if baseline else ""
    to_oracle = f"{p99 / oracle.quantile(0.99):.2f}x" if oracle else ""
    more_good = f"{outcome.goodput / baseline.goodput:.2f}x" if baseline and baseline.goodput else ""
    decision = np.quantile(outcome.decision_us, [0.5, 0.99])
    name = case.policy + (f", crash, {outcome.num_lost} lost" if case.crash_at is not None else "")
    cells = (
        case.workload, f"{case.utilisation:.2f}", case.num_replicas, case.num_routers, f"{case.delay_s:g} s", name,
        f"{p50:.2f} s", f"{p99:.2f} s", to_baseline, to_oracle, f"{np.quantile(outcome.token_s, 0.99) * 1e3:.0f} ms",
        f"{outcome.is_good.mean():.1%}", f"{outcome.goodput:.3f}", more_good, f"{outcome.hit_share:.1%}",
        f"{outcome.imbalance:.2f}", f"{outcome.busy_share:.2f}", f"{decision[0]:.0f}, {decision[1]:.0f} us",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _of(outcomes: Sequence[Outcome], case: Case, policy: str) -> Outcome | None:
    """Gives the outcome of the same case under another policy, or of one that differs in what that one ignores."""
    wanted = replace(case, policy=policy)
    same = [outcome for outcome in outcomes if outcome.case == wanted]
    alike = [one for one in outcomes if replace(one.case, delay_s=case.delay_s, num_routers=case.num_routers) == wanted]
    return next(iter(same + alike), None)


def _cases(part: str, arguments: argparse.Namespace) -> list[Case]:
    """Gives the cases of a part; who is compared with comes first."""
    policies = sorted(arguments.policies, key=lambda policy: (policy != BASELINE, policy != "oracle"))
    usual = replace(USUAL, turns_per_replica=arguments.turns or TURNS[USUAL.workload])
    others = [replace(usual, policy=policy) for policy in policies if policy in (BASELINE, "oracle")]
    if part == "grid":
        return [
            Case(workload, policy, utilisation, turns_per_replica=arguments.turns or TURNS[workload])
            for workload in arguments.workloads
            for utilisation in load(workload)["utilisations"]
            if not arguments.utilisations or utilisation in arguments.utilisations
            for policy in policies
        ]
    if part == "delays":
        return others + [replace(usual, delay_s=delay) for delay in DELAYS_S]
    if part == "routers":
        return others + [replace(usual, num_routers=number) for number in NUM_ROUTERS]
    if part == "sizes":
        sizes = [replace(usual, num_replicas=size) for size in SIZES]
        return [replace(case, policy=policy) for case in sizes for policy in policies if policy != "round robin"]
    if part == "rates":
        rated = replace(usual, num_replicas=16, num_routers=4, turns_per_replica=arguments.turns or TURNS["rollouts"])
        return [
            replace(rated, workload="rollouts", utilisation=utilisation, policy=policy)
            for utilisation in RATES
            for policy in policies
            if policy in (BASELINE, "ours", "oracle")
        ]
    return [
        replace(usual, workload="bursts", utilisation=utilisation, crash_at=crash_at, policy=policy)
        for utilisation in arguments.utilisations or load("bursts")["utilisations"]
        for crash_at in (None, *CRASHES_AT)
        for policy in policies
        if policy in ("ours", "oracle", BASELINE)
    ]


def _sustained(outcomes: Sequence[Outcome]) -> str:
    """Gives the utilisation up to which nearly all requests stay within their limits, between those that were run."""
    lines = ["\n| router | " + " | ".join(f"{share:.0%} in time up to" for share in ATTAINED) + " |\n|---|---|---|"]
    for policy in dict.fromkeys(outcome.case.policy for outcome in outcomes):
        rates = [outcome.case.utilisation for outcome in outcomes if outcome.case.policy == policy]
        good = [float(outcome.is_good.mean()) for outcome in outcomes if outcome.case.policy == policy]
        # The share falls as the rate grows; np.interp wants what is looked up ascending.
        falling = np.minimum.accumulate(good)
        up_to = [_rate_at(share, falling, rates) for share in ATTAINED]
        lines.append(f"| {policy} | " + " | ".join(up_to) + " |")
    return "\n".join(lines)


def _rate_at(share: float, falling: npt.NDArray[np.float64], rates: Sequence[float]) -> str:
    """Gives the rate at which the share has fallen that far; beyond those that were run, only on which side it is."""
    if falling[0] < share:
        return f"less than {rates[0]:.2f}"
    if falling[-1] >= share:
        return f"more than {rates[-1]:.2f}"
    return f"{np.interp(share, falling[::-1], rates[::-1]):.2f}"


def _scale_up_and_down(arguments: argparse.Namespace, scale: Scale) -> None:
    """Runs the load steps with autoscaling, prints what the fleet did."""
    case = Case("steps", "ours", 0.33, num_replicas=16, num_routers=2, turns_per_replica=arguments.turns or 650)
    targets = ScalingTargets(minimum=1, maximum=16)
    outcome, run = simulate_scaled(case, scale, targets)
    print(
        f"\n## scaling\n\n{targets}\n\n| second | replicas wanted | ready | requests | reason |\n|---|---|---|---|---|"
    )
    for before, moment in pairwise(run.moments):
        if moment.wanted != before.wanted:
            change = f"{before.wanted} to {moment.wanted}"
            print(f"| {moment.now:.0f} | {change} | {moment.ready} | {moment.num_requests} | {moment.reason} |")
    ready = np.mean([moment.ready for moment in run.moments])
    print(
        f"\nfirst token p50 {outcome.quantile(0.5):.2f} s, p99 {outcome.quantile(0.99):.2f} s,"
        f" {outcome.is_good.mean():.1%} in time, {ready:.1f} replicas ready in the mean of 16,"
        f" {run.num_turns()} changes of direction"
    )
    if arguments.plots is not None:
        plots.draw_scaling(run.moments, arguments.plots)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_sim", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", type=_among(PARTS), default=list(PARTS), help=f"with commas, of {', '.join(PARTS)}")
    parser.add_argument("--workloads", type=_among(WORKLOADS), default=list(WORKLOADS), help="of the grid")
    parser.add_argument("--policies", type=_among(ROUTERS), default=list(COMPARED), help=f"of {', '.join(ROUTERS)}")
    parser.add_argument("--utilisations", type=lambda text: [float(part) for part in text.split(",")], default=[])
    parser.add_argument("--replica", choices=sorted(scales()), default="cpu")
    parser.add_argument("--turns", type=int, help="requests for each replica; else by workload")
    parser.add_argument("--plots", type=Path, help="a folder for PNG files; none by default")
    return parser.parse_args()


def _among(known: Sequence[str] | dict[str, type]) -> "Scale | object":
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = sorted(set(names) - set(known))
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    main()
