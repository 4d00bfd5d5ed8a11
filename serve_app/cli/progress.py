"""Progress on stderr: a line that says what goes on and for how long."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

QUIET_PERIOD_S = 10.0
"""Between two lines where stderr is no terminal: a log shows that the command is alive, and stays short."""


@contextmanager
def progress(stage: str) -> Iterator[Callable[[str], None]]:
    """Show stage, and after it each text given to the yielded function, with the time elapsed."""
    if sys.stderr.isatty():
        with _spinner(stage) as report:
            yield report
    else:
        with _lines(stage) as report:
            yield report


@contextmanager
def _spinner(stage: str) -> Iterator[Callable[[str], None]]:
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(stage, total=None)
        yield lambda text: bar.update(task, description=text)


@contextmanager
def _lines(stage: str) -> Iterator[Callable[[str], None]]:
    """A line when the stage changes, and one in every quiet period."""
    started, stopped, current = time.monotonic(), threading.Event(), [stage]

    def show(text: str) -> None:
        if text != current[0] or text is stage:
            current[0] = text
            sys.stderr.write(f"{text} ...\n")
            sys.stderr.flush()

    def remind() -> None:
        while not stopped.wait(QUIET_PERIOD_S):
            sys.stderr.write(f"{current[0]} ... {time.monotonic() - started:.0f} s\n")
            sys.stderr.flush()

    show(stage)
    reminder = threading.Thread(target=remind, name="pitstop-progress", daemon=True)
    reminder.start()
    try:
        yield show
    finally:
        stopped.set()
        reminder.join()
