"""What the doctor says of one thing."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """GOOD: as it should be. WARNING: works, but worse than it could. ERROR: `pitstop serve` would fail."""

    GOOD = "good"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """what: the thing as it is. why: what follows from it. remedy: what to do. A good one has the first alone."""

    level: Level
    subject: str
    what: str
    why: str = ""
    remedy: str = ""


Findings = Iterator[Finding]


def good(subject: str, what: str) -> Finding:
    """Gives that something is as it should be."""
    return Finding(Level.GOOD, subject, what)


def warning(subject: str, what: str, *, why: str, remedy: str) -> Finding:
    """Gives that something could be better."""
    return Finding(Level.WARNING, subject, what, why, remedy)


def error(subject: str, what: str, *, why: str, remedy: str) -> Finding:
    """Gives that something would fail."""
    return Finding(Level.ERROR, subject, what, why, remedy)
