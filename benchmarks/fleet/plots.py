"""The plots of `benchmarks/fleet_sim.py`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet.scaled import Moment
from benchmarks.fleet.simulation import Case, Outcome

COLOURS = {
    "ours": "#d62728",
    "power of two": "#1f77b4",
    "cache-aware": "#2ca02c",
    "cache-aware tuned": "#98df8a",
    "round robin": "#7f7f7f",
    "oracle": "#000000",
    "ours without prefixes": "#ff9896",
}
VARIED = {
    "delays": ("delay_s", "median age of reports, s"),
    "routers": ("num_routers", "routers"),
    "sizes": ("num_replicas", "replicas"),
}


def draw(part: str, outcomes: Sequence[Outcome], folder: Path, replica: str) -> None:
    """Writes the plot of one part."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure = _grid(pyplot, outcomes) if part == "grid" else _sweep(pyplot, part, outcomes) if part in VARIED else None
    if figure is not None:
        figure.savefig(folder / f"fleet_{part}_{replica}.png", dpi=110)
        pyplot.close(figure)


def draw_scaling(moments: Sequence[Moment], folder: Path) -> None:
    """Writes the plot of a fleet that grows and shrinks."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, axis = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
    seconds = [moment.now for moment in moments]
    axis.step(seconds, [moment.wanted for moment in moments], color="#d62728", label="replicas wanted")
    axis.step(seconds, [moment.ready for moment in moments], color="#1f77b4", lw=1, label="replicas ready")
    axis.set(xlabel="seconds", ylabel="replicas")
    requests = axis.twinx()
    requests.plot(seconds, [moment.num_requests for moment in moments], color="#7f7f7f", lw=0.5, label="requests")
    requests.set(ylabel="requests there")
    axis.legend(fontsize=7)
    figure.savefig(folder / "fleet_scaling.png", dpi=110)
    pyplot.close(figure)


def _grid(pyplot: Any, outcomes: Sequence[Outcome]) -> Any:
    workloads = list(dict.fromkeys(outcome.case.workload for outcome in outcomes))
    figure, axes = pyplot.subplots(2, len(workloads), figsize=(3.4 * len(workloads), 5.6), squeeze=False,
                                   sharex=True, layout="constrained")  # fmt: skip
    for column, workload in enumerate(workloads):
        of_it = [outcome for outcome in outcomes if outcome.case.workload == workload]
        _lines(axes[0][column], of_it, "utilisation", lambda outcome: outcome.quantile(0.99))
        _lines(axes[1][column], of_it, "utilisation", lambda outcome: 100 * outcome.is_good.mean())
        axes[0][column].set(title=workload, yscale="log")
        axes[1][column].set(xlabel="utilisation without any cached prefix", ylim=(0, 102))
    axes[0][0].set(ylabel="p99 time to first token, s")
    axes[1][0].set(ylabel="requests within their limits, %")
    axes[0][0].legend(fontsize=7)
    return figure


def _sweep(pyplot: Any, part: str, outcomes: Sequence[Outcome]) -> Any:
    field, label = VARIED[part]
    figure, axis = pyplot.subplots(figsize=(4.6, 3.4), layout="constrained")
    _lines(axis, outcomes, field, lambda outcome: outcome.quantile(0.99))
    axis.set(
        xscale="log", yscale="log", xlabel=label, ylabel="p99 time to first token, s", title=_title(outcomes[0].case)
    )
    axis.legend(fontsize=7)
    return figure


def _lines(axis: Any, outcomes: Sequence[Outcome], field: str, value: Any) -> None:
    for policy in dict.fromkeys(outcome.case.policy for outcome in outcomes):
        points = [(getattr(one.case, field), value(one)) for one in outcomes if one.case.policy == policy]
        style = "--" if policy == "oracle" else "-"
        axis.plot(*np.array(points).T, style, marker="o", ms=3, label=policy, color=COLOURS[policy])
    axis.grid(alpha=0.3, which="both")


def _title(case: Case) -> str:
    return f"{case.workload}, utilisation {case.utilisation:g}"
