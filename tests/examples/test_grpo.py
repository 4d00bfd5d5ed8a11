"""The example runs as a stranger runs it, and does what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUM_STEPS = 5
TIMEOUT_S = 420
"""Two replicas start and a few steps run, on a machine that does other things too."""
LINE = re.compile(r"step +(\d+)  reward (\S+)  weights \[([\d, ]+)\]  parity (\S+)  .* swap to (\d+)")


@pytest.mark.slow
def test_the_reward_rises_and_rollouts_agree_with_the_trainer() -> None:
    command = [sys.executable, "examples/grpo.py", "--steps", str(NUM_STEPS)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    steps = LINE.findall(run.stdout)
    assert [int(step) for step, *_ in steps] == list(range(1, NUM_STEPS + 1)), run.stdout
    rewards = [float(reward) for _, reward, *_ in steps]
    assert rewards[-1] > rewards[0] + 0.05
    # The swap of one step brings the weights that draw the next one's rollouts.
    assert [drawn for _, _, drawn, _, _ in steps[1:]] == [swapped for *_, swapped in steps[:-1]]
    assert all(float(parity) < 1e-5 for _, _, _, parity, _ in steps)
