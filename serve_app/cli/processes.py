"""Starting one child and, at the end, every process that came of it (Linux).

Ray's processes put themselves into other sessions and overwrite their environment, so neither finds them all. Being
their subreaper does: whoever loses its parent becomes this process's child, and so stays below it until it is killed.
For the case that this process is itself killed, the child asks the kernel for a SIGTERM at its parent's death; Ray's
processes end with the child in the same way.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""Numbers of <linux/prctl.h>."""
GRACE_S = 4.0
"""For an orderly end, which takes 3 s without streams; open streams would hold it up for as long as they last."""
KILL_S = 5.0
"""Until the killed are gone: milliseconds, on an overloaded machine seconds. In all it stays below ten."""
POLL_S = 0.1

_libc = ctypes.CDLL(None, use_errno=True)


def start_child(command: list[str], *, environment: Mapping[str, str], log_file: Path) -> subprocess.Popen[bytes]:
    """Start command in a session of its own, so that Ctrl-C in the terminal reaches only this process.

    Call it from the main thread: the death signal is bound to the thread that forks. Output goes to log_file, which is
    begun anew.
    """
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("wb") as log:
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_prepare_child,
        )


def end_all(child: subprocess.Popen[bytes] | None) -> None:
    """Ask the child to end, as Ctrl-C does; after the grace period kill whatever is left below this process."""
    if child is not None and child.poll() is None:
        child.send_signal(signal.SIGINT)
        _wait(child)
    deadline = time.monotonic() + KILL_S
    while (left := _descendants()) and time.monotonic() < deadline:
        for process in left:
            _kill(process)
        time.sleep(POLL_S)
        _reap()


def _wait(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        return


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


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


def _prepare_child() -> None:
    """Run in the child between fork and exec."""
    # A script's background jobs (`make serve &`, nohup) ignore SIGINT, and so would the child, which is ended by it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
