"""Work beside generation rests, and work beside nothing does not."""

import threading
import time
from pathlib import Path

import pytest
import torch
from engine_runs import StepGate, prompt_of, running
from tiny_models import tiny_model

from engine import pacing
from engine.openmp import alone
from engine.pacing import Pace


def test_rest_follows_the_work_and_only_while_somebody_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = [0.0], []
    monkeypatch.setattr(pacing, "thread_time", lambda: clock[0])
    monkeypatch.setattr(pacing, "sleep", slept.append)
    is_busy = True
    pace = Pace(lambda: is_busy, share=0.25)
    clock[0] = 2.0
    pace.rest()
    clock[0] = 3.0
    pace.rest()
    is_busy = False
    clock[0] = 9.0
    pace.rest()
    assert slept == [6.0, 3.0]


def test_work_too_short_for_a_sleep_is_rested_from_with_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = [0.0], []
    monkeypatch.setattr(pacing, "thread_time", lambda: clock[0])
    monkeypatch.setattr(pacing, "sleep", slept.append)
    pace = Pace(lambda: True, share=0.5)
    for _ in range(4):
        clock[0] += 0.75 * pacing.LEAST_WORK_S
        pace.rest()
    assert slept == pytest.approx([1.5 * pacing.LEAST_WORK_S] * 2)


def test_staging_rests_between_tensors_while_requests_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []
    monkeypatch.setattr(pacing, "sleep", slept.append)
    monkeypatch.setattr(pacing, "LEAST_WORK_S", 0.0)
    tiny_model(seed=2).save_pretrained(tmp_path)
    model = tiny_model(seed=1)
    with running(model) as manager:
        manager.stage_weights(tmp_path)
        assert slept == []
        gate = StepGate(model)
        request_id = manager.add_request(prompt_of(30), max_new_tokens=4, streaming=True)
        gate.wait()
        gate.step()
        manager.stage_weights(tmp_path)
        assert len(slept) >= 21
        gate.open()
        assert list(manager.request_id_iter(request_id))


def test_a_thread_that_computes_alone_leaves_the_others_their_threads() -> None:
    torch.set_num_threads(2)
    try:
        seen = []

        def compute() -> None:
            with alone():
                torch.ones(1 << 20).sum()
                seen.append(torch.get_num_threads())
            seen.append(torch.get_num_threads())

        worker = threading.Thread(target=compute)
        worker.start()
        deadline = time.monotonic() + 30
        worker.join(deadline - time.monotonic())
        assert seen == [1, 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
