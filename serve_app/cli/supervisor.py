"""The process between `pitstop serve` and `serve run`: `python -m serve_app.cli.supervisor COMMAND...`."""

import contextlib
import signal
import sys
from types import FrameType

from serve_app.cli.processes import adopt_orphans, end_descendants, start_below


class Stopped(BaseException):
    """A signal asked for the end."""


def supervise(command: list[str]) -> int:
    """Run command until it ends or a SIGTERM comes, then end everything that came of it; returns its exit status."""
    signal.signal(signal.SIGTERM, _stop)
    adopt_orphans()
    child = start_below(command)
    with contextlib.suppress(Stopped):
        child.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_descendants(child)
    return child.returncode or 0


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise Stopped


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1:]))
