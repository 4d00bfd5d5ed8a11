import subprocess
import sys
from pathlib import Path

from serve_app.cli.processes import GRACE_S

ROOT = Path(__file__).parents[2]
CHILD = """
import time
print("started", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("ended in order", flush=True)
"""
LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
from serve_app.cli.processes import end_descendants, start_below

signal.signal(signal.SIGINT, signal.SIG_IGN)
log = Path(sys.argv[1])
log.touch()
sys.stdout.flush()
os.dup2(os.open(log, os.O_WRONLY), 1)
child = start_below([sys.executable, "-c", sys.argv[2]])
while "started" not in log.read_text():
    time.sleep(0.02)
began = time.monotonic()
end_descendants(child)
print(time.monotonic() - began, file=sys.stderr)
"""


def test_a_child_ends_in_order_where_interrupts_are_ignored(tmp_path: Path) -> None:
    """As in a background job of a script. In a process of its own: `end_descendants` ends whatever is below it."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", LAUNCHER, str(log), CHILD]
    took_s = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True, timeout=60).stderr
    assert log.read_text().splitlines() == ["started", "ended in order"]
    assert float(took_s) < GRACE_S
