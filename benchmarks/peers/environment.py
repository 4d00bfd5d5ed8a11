"""Makes a peer's environment and its form of the model, once, and runs each measurement in a process of its own."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import Contestant, Peer
from benchmarks.workload import Measurement, Workload

REPOSITORY = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
TIMEOUT_S = 3600.0
"""Longer than any honest install, export or measurement: a peer that hangs must end."""
NUM_LINES_SHOWN = 20


class ContestantFailed(RuntimeError):
    """It could not be installed or did not run; the message is the last line that it said."""


def make_ready(peer: Peer, folder: Path, model: str) -> str:
    """Installs the peer into `folder` and converts the model unless that is done; gives the model to load.

    Blocking, many minutes the first time. Raises ContestantFailed.
    """
    if not Path(model).is_dir():
        raise ContestantFailed(f"peers take a model from a folder, and {model} is none")
    _install(peer, folder)
    made = folder / f"model-{_fingerprint(Path(model))}"
    if not made.exists():
        print(f"{peer.TITLE}: converting the model", file=sys.stderr)
        partial = made.with_name(f"{made.name}.partial")
        _remove(partial)
        _work_in(folder, peer, {"action": "prepare", "model": str(Path(model).resolve()), "target": str(partial)})
        partial.rename(made)
    return str(made)


def measure_peer(peer: Peer, folder: Path, workload: Workload, setting: dict[str, Any]) -> Measurement:
    """Measures in the peer's environment. Raises ContestantFailed."""
    return Measurement(**_work_in(folder, peer, workload.job(setting)))


def measure_here(contestant: Contestant, workload: Workload, setting: dict[str, Any]) -> Measurement:
    """Measures in the environment of this process. Raises ContestantFailed."""
    return Measurement(**_work(sys.executable, contestant, workload.job(setting), {"PYTHONPATH": str(REPOSITORY)}))


def _install(peer: Peer, folder: Path) -> None:
    stamp, wanted = folder / ".installed", "\n".join([*peer.REQUIREMENTS, *peer.REMOVED])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"{peer.TITLE}: installing into {folder}", file=sys.stderr)
    stamp.unlink(missing_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", *peer.REQUIREMENTS])
    if peer.REMOVED:
        _run([*pip, "uninstall", "--quiet", "--yes", *peer.REMOVED])
    stamp.write_text(wanted)


def _work_in(folder: Path, peer: Peer, job: dict[str, Any]) -> dict[str, Any]:
    return _work(str(folder / "bin" / "python"), peer, job, peer.environment(job, folder))


def _work(python: str, contestant: Contestant, job: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    # -P: a contestant's file may be called like the package that it imports.
    output = _run([python, "-P", str(WORKER), contestant.__file__], order=json.dumps(job), variables=variables)
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


def _run(command: list[str], *, order: str = "", variables: dict[str, str] | None = None) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        finished = subprocess.run(
            command,
            input=order,
            capture_output=True,
            text=True,
            errors="replace",
            env=inherited | (variables or {}),
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ContestantFailed(f"it ran longer than {TIMEOUT_S:.0f} s") from error
    if finished.returncode != 0:
        said = [line.strip() for line in finished.stderr.splitlines() if line.strip()] or ["it said nothing"]
        print("\n".join(said[-NUM_LINES_SHOWN:]), file=sys.stderr)
        raise ContestantFailed(f"exit code {finished.returncode}: {said[-1]}")
    return finished.stdout


def _fingerprint(model: Path) -> str:
    """Changes with the folder and the files in it."""
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in model.iterdir())
    return hashlib.sha256(repr((str(model.resolve()), files)).encode()).hexdigest()[:16]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
