"""One command below a supervisor, so that nothing of it outlives `pitstop serve`, however that ends (Linux).

Ray's processes put themselves into other sessions, overwrite their environment, and some stay when Ray itself is
killed. The supervisor (`supervisor.py`) is their subreaper: whoever loses its parent becomes its child, so it finds
them all. It is asked to end everything by SIGTERM, and the kernel sends it one when `pitstop serve` dies.
"""

import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""Numbers of <linux/prctl.h>."""
GRACE_S = 4.0
"""For an orderly end, which takes 3 s without streams; open streams would hold it up for as long as they last."""
KILL_S = 4.0
"""Until the killed are gone: milliseconds, on an overloaded machine seconds."""
SUPERVISOR_S = 9.0
"""For the supervisor to end everything; a signal has to be obeyed within ten."""
POLL_S = 0.1

_libc = ctypes.CDLL(None, use_errno=True)


def start_supervised(command: list[str], *, environment: Mapping[str, str], log_file: Path) -> subprocess.Popen[bytes]:
    """Start command below a supervisor; returns the supervisor, which ends when the command has ended.

    Call it from the main thread: the death signal is bound to the thread that forks. Output goes to log_file, which is
    begun anew. The new session keeps Ctrl-C in the terminal from everybody but this process.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "serve_app.cli.supervisor", *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(_prepare_child, signal.SIGTERM),
        )


def end_supervised(supervisor: subprocess.Popen[bytes]) -> None:
    """Return when everything below the supervisor has ended; kills the supervisor should it not manage."""
    supervisor.terminate()
    try:
        supervisor.wait(SUPERVISOR_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()


def adopt_orphans() -> None:
    """Make this process the parent of all its descendants that lose theirs."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


def start_below(command: list[str]) -> subprocess.Popen[bytes]:
    """Start command so that the kernel kills it when this process dies.

    By SIGKILL, which Ray's servers pass on: while Ray starts, nobody may look at a SIGTERM.
    """
    return subprocess.Popen(command, preexec_fn=functools.partial(_prepare_child, signal.SIGKILL))


def end_descendants(child: subprocess.Popen[bytes]) -> None:
    """Ask the child to end, as Ctrl-C does; after the grace period kill whatever is left below this process."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
    deadline = time.monotonic() + KILL_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            _kill(process)
        time.sleep(POLL_S)
        _reap()


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _reap() -> None:
    """Collect ended children, adopted ones included, which would stay as zombies otherwise."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _prepare_child(number: signal.Signals) -> None:
    """Have the kernel send the signal when the parent dies. Runs in the child between fork and exec."""
    # A script's background jobs (`make serve &`, nohup) ignore SIGINT, and so would the child, which is ended by it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _libc.prctl(PR_SET_PDEATHSIG, number)
