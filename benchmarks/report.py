"""The table of one size of the workload: each contestant at its best setting."""

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers import BASELINE, Contestant
from benchmarks.workload import LONGEST_PROMPT, SHORTEST_PROMPT, Measurement, Workload

HEADINGS = (
    "engine",
    "tokens/s",
    "to transformers' best",
    "ours to it",
    "seconds",
    "CPU seconds",
    "peak memory",
    "same outputs as ours",
)


@dataclass(slots=True)
class Result:
    """Of one contestant, by the title of each setting: the fastest measurement, or why there is none."""

    contestant: Contestant
    measured: dict[str, Measurement] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, title: str, measurement: Measurement) -> None:
        """Keeps it if it is the fastest of its setting."""
        if title not in self.measured or measurement.seconds < self.measured[title].seconds:
            self.measured[title] = measurement

    @property
    def best(self) -> tuple[str, Measurement] | None:
        """The fastest setting."""
        return max(self.measured.items(), key=lambda item: item[1].tokens_per_s, default=None)


def setting_title(setting: dict[str, Any]) -> str:
    """Gives the setting in words."""
    return ", ".join(f"{name}={value}" for name, value in setting.items()) or "its own choice"


def heading(workload: Workload, num_rounds: int) -> str:
    """Gives the line over a table."""
    return (
        f"{len(workload.prompts)} prompts of {SHORTEST_PROMPT} to {LONGEST_PROMPT} tokens, {workload.num_new_tokens}"
        f" new tokens each, greedy, float32, {workload.num_threads} threads, best of {num_rounds}"
    )


def table(results: Sequence[Result]) -> str:
    """Gives the table; the first result is ours."""
    ours = results[0].best
    baseline = next((one.best for one in results if one.contestant is BASELINE), None)
    lines = [_row(HEADINGS), _row(["---"] * len(HEADINGS))]
    lines += [_line(result, ours and ours[1], baseline and baseline[1]) for result in results]
    return "\n".join(lines)


def notes(results: Sequence[Result]) -> str:
    """Gives, for each contestant, its terms and the speed of every setting."""
    lines = []
    for result in results:
        speeds = [f"{title}: {one.tokens_per_s:.1f}" for title, one in result.measured.items()]
        speeds += [f"{title}: failed, {reason}" for title, reason in result.failures.items()]
        packages = " ".join(getattr(result.contestant, "REQUIREMENTS", ())) or "the project's own environment"
        terms = f"- {result.contestant.TITLE} ({packages}): {result.contestant.NOTE}."
        lines.append(f"{terms} Tokens/s by setting: {'; '.join(speeds)}")
    return "\n".join(lines)


def machine() -> str:
    """Gives the machine and the versions of what runs in the project's environment."""
    return (
        f"Machine: {_processor()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB, Python {platform.python_version()},"
        f" torch {version('torch')}, transformers {version('transformers')}"
    )


def _line(result: Result, ours: Measurement | None, baseline: Measurement | None) -> str:
    if result.best is None:
        reason = "; ".join(dict.fromkeys(result.failures.values()))
        return _row([result.contestant.TITLE, f"none: {reason}", *["-"] * (len(HEADINGS) - 2)])
    title, best = result.best
    cells = [
        f"{result.contestant.TITLE}, {title}" if len(result.contestant.SETTINGS) > 1 else result.contestant.TITLE,
        f"{best.tokens_per_s:.1f}",
        _ratio(best, baseline),
        _ratio(ours, best),
        f"{best.seconds:.1f}",
        f"{best.cpu_s:.1f}",
        f"{best.peak_mib:.0f} MiB",
        _agreement(ours, best),
    ]
    return _row(cells)


def _ratio(one: Measurement | None, other: Measurement | None) -> str:
    return f"{one.tokens_per_s / other.tokens_per_s:.2f}x" if one and other else "-"


def _agreement(ours: Measurement | None, theirs: Measurement) -> str:
    """Whole outputs that are the same, and tokens up to each first difference: behind it the texts are others."""
    if ours is None:
        return "-"
    pairs = list(zip(ours.outputs, theirs.outputs, strict=True))
    same = sum(mine == other for mine, other in pairs)
    num_tokens = sum(len(mine) for mine, _ in pairs)
    agreed = sum(_common_prefix(mine, other) for mine, other in pairs)
    return f"{same} of {len(pairs)}, {100 * agreed / num_tokens:.1f} % of tokens"


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    differs = (index for index, (mine, theirs) in enumerate(zip(one, other, strict=True)) if mine != theirs)
    return next(differs, len(one))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
