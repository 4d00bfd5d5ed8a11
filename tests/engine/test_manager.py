"""The manager's life: start, stop, pause, new weights, results and handlers."""

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import (
    DEADLINE_S,
    StepGate,
    greedy,
    is_pause_wanted,
    prompt_of,
    result_of,
    run_all,
    running,
    small_config,
    wait_until,
)
from tiny_models import tiny_model
from transformers import PreTrainedModel

from engine import (
    ContinuousBatchingManager,
    DuplicateRequest,
    EngineStopped,
    FinishReason,
    GenerationOutput,
    InvalidRequest,
    RequestStatus,
    SamplingParams,
    WeightsError,
    WeightsInvalid,
    WeightSpan,
    continuous_batching_context_manager,
    destroy_cached_continuous_batching_manager,
    enable,
    generate_batch,
    init_continuous_batching,
    stage_weights,
)

PROMPT = prompt_of(70, seed=4)
NUM_NEW = 24


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model(seed=1)


@pytest.fixture
def manager(model: PreTrainedModel) -> Iterator[ContinuousBatchingManager]:
    with running(model) as manager:
        yield manager


@pytest.fixture
def new_weights(tmp_path: Path) -> Path:
    tiny_model(seed=2).save_pretrained(tmp_path)
    return tmp_path


def old_answer(prompt: list[int] = PROMPT, num_new: int = NUM_NEW) -> list[int]:
    return greedy(tiny_model(seed=1), prompt, num_new)


def new_answer(prompt: list[int] = PROMPT, num_new: int = NUM_NEW) -> list[int]:
    return greedy(tiny_model(seed=2), prompt, num_new)


def put_in_place(model: PreTrainedModel) -> None:
    """Gives the model the weights of seed 2, in its own storages."""
    model.load_state_dict(tiny_model(seed=2).state_dict())


# Pausing


@pytest.mark.usefixtures("depth")
def test_nothing_is_generated_in_a_pause_and_nothing_is_lost(manager: ContinuousBatchingManager) -> None:
    expected = old_answer()
    with manager.pause(weights_changed=False):
        assert manager.stats().is_paused
        steps = manager.stats().steps_total
        request_id = manager.add_request(PROMPT, max_new_tokens=NUM_NEW)
        assert manager.get_result(request_id, timeout=0.05) is None
        assert manager.stats().steps_total == steps
        assert manager.stats().num_waiting == 1
    assert result_of(manager, request_id).generated_tokens == expected
    assert not manager.stats().is_paused
    assert manager.stats().paused_seconds_total > 0
    phases = manager.stats().step_phase_seconds_total
    assert list(phases) == ["plan", "launch", "wait", "commit", "publish"]
    assert all(seconds > 0 for seconds in phases.values())


@pytest.mark.usefixtures("depth")
def test_a_pause_in_the_middle_of_a_request_changes_nothing(model: PreTrainedModel) -> None:
    expected = old_answer()
    with running(model, max_batch_tokens=16) as manager:
        request_id = manager.add_request(PROMPT, max_new_tokens=NUM_NEW)
        while manager.get_result(request_id, timeout=0) is None:
            with manager.pause(weights_changed=False):
                steps = manager.stats().steps_total
            if steps > 8:
                break
        assert result_of(manager, request_id).generated_tokens == expected


@pytest.mark.usefixtures("depth")
def test_who_pauses_again_and_again_lets_a_step_pass_in_between(model: PreTrainedModel) -> None:
    with running(model, max_batch_tokens=16) as manager:
        # Far from its end when the pauses are over, however many steps pass in between.
        request_id = manager.add_request(PROMPT, max_new_tokens=400)
        seen = []
        for _ in range(10):
            with manager.pause(weights_changed=False):
                seen.append(manager.stats().steps_total)
        assert all(later > earlier for earlier, later in pairwise(seen[1:])), seen
        manager.cancel_request(request_id)
        assert result_of(manager, request_id).status is RequestStatus.CANCELLED


@pytest.mark.usefixtures("depth")
def test_pauses_nest_and_may_be_held_by_several_threads(manager: ContinuousBatchingManager) -> None:
    holds, may_leave = threading.Event(), threading.Event()

    def hold() -> None:
        with manager.pause(weights_changed=False):
            holds.set()
            assert may_leave.wait(DEADLINE_S)

    other = threading.Thread(target=hold)
    with manager.pause(weights_changed=False):
        with manager.paused(weights_changed=False):
            other.start()
            assert holds.wait(DEADLINE_S)
        assert manager.stats().is_paused
    assert manager.stats().is_paused
    request_id = manager.add_request([1, 2, 3], max_new_tokens=3)
    assert manager.get_result(request_id, timeout=0.05) is None
    may_leave.set()
    other.join(DEADLINE_S)
    assert len(result_of(manager, request_id).generated_tokens) == 3


@pytest.mark.usefixtures("depth")
def test_an_error_inside_a_pause_ends_the_pause(manager: ContinuousBatchingManager) -> None:
    with pytest.raises(ValueError, match="mine"), manager.pause():
        raise ValueError("mine")
    assert not manager.stats().is_paused
    assert manager.weight_version == 2
    assert len(run_all(manager, [[1, 2, 3]], 3)[0]) == 3


def test_a_manager_that_does_not_run_cannot_be_paused(model: PreTrainedModel) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    with pytest.raises(EngineStopped, match="start"), manager.pause():
        pass
    manager.start()
    manager.stop(timeout=DEADLINE_S)
    with pytest.raises(EngineStopped, match="start"), manager.pause():
        pass


def test_stopping_inside_the_own_pause_is_refused(manager: ContinuousBatchingManager) -> None:
    with manager.pause(weights_changed=False), pytest.raises(RuntimeError, match="pause"):
        manager.stop()
    assert manager.is_running()


@pytest.mark.usefixtures("depth")
def test_the_model_is_its_owners_inside_a_pause(model: PreTrainedModel) -> None:
    expected = old_answer()
    with running(model) as manager:
        request_id = manager.add_request(PROMPT, max_new_tokens=NUM_NEW)
        with manager.pause(weights_changed=False):
            assert greedy(model, PROMPT, NUM_NEW) == expected
            model.train()
            ids = torch.tensor([PROMPT])
            model(ids, labels=ids).loss.backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
        assert result_of(manager, request_id).generated_tokens == expected


# Weights that change


@pytest.mark.usefixtures("depth")
def test_a_prefix_of_the_old_weights_is_not_used_with_the_new_ones(model: PreTrainedModel) -> None:
    old, new = old_answer(), new_answer()
    assert old != new
    with running(model) as manager:
        assert run_all(manager, [PROMPT], NUM_NEW) == [old]
        cached = manager.stats().cached_tokens_total
        with manager.pause():
            put_in_place(model)
        assert manager.weight_version == 2
        assert run_all(manager, [PROMPT], NUM_NEW) == [new]
        assert manager.stats().cached_tokens_total == cached
        assert run_all(manager, [PROMPT], NUM_NEW) == [new]
        assert manager.stats().cached_tokens_total > cached


def test_prefixes_are_kept_when_the_weights_did_not_change(manager: ContinuousBatchingManager) -> None:
    run_all(manager, [PROMPT], NUM_NEW)
    with manager.pause(weights_changed=False):
        pass
    assert manager.weight_version == 1
    assert result_of(manager, manager.add_request(PROMPT, max_new_tokens=1)).num_cached_tokens == 64


@pytest.mark.usefixtures("depth")
def test_committed_weights_answer_the_next_request(model: PreTrainedModel, new_weights: Path) -> None:
    old, new = old_answer(), new_answer()
    with running(model) as manager:
        assert run_all(manager, [PROMPT], NUM_NEW) == [old]
        staged = stage_weights(model, str(new_weights))
        assert run_all(manager, [PROMPT], NUM_NEW) == [old]
        paused_s = manager.commit_weights(staged)
        assert 0 < paused_s < 1
        assert manager.weight_version == manager.stats().weight_version == 2
        output = result_of(manager, manager.add_request(PROMPT, max_new_tokens=NUM_NEW))
        assert (output.generated_tokens, output.num_cached_tokens) == (new, 0)
        assert output.weight_versions == (WeightSpan(2, 0, NUM_NEW),)
        assert manager.stats().weight_swaps_total == 1


@pytest.mark.usefixtures("depth")
def test_weights_can_be_swapped_again_and_again(model: PreTrainedModel, new_weights: Path, tmp_path: Path) -> None:
    old, new = old_answer(), new_answer()
    old_weights = tmp_path / "old"
    model.save_pretrained(old_weights)
    with running(model) as manager:
        for version, folder, expected in ((2, new_weights, new), (5, old_weights, old), (6, new_weights, new)):
            staged = stage_weights(model, str(folder))
            manager.commit_weights(staged, version=version)
            staged.discard()
            assert manager.weight_version == version
            assert run_all(manager, [PROMPT, PROMPT], NUM_NEW) == [expected, expected]


def begun_request(manager: ContinuousBatchingManager, model: PreTrainedModel, num_tokens: int) -> tuple[str, StepGate]:
    """Gives a request that has `num_tokens` tokens when the step that stands at the gate is done."""
    gate = StepGate(model)
    request_id = manager.add_request(PROMPT, max_new_tokens=NUM_NEW)
    gate.wait()
    for _ in range(num_tokens - 1):
        gate.step()
    return request_id, gate


def commit_at_gate(manager: ContinuousBatchingManager, gate: StepGate, staged: Any, **arguments: Any) -> None:
    """Commits after the step that stands at the gate."""
    with ThreadPoolExecutor(1) as pool:
        commit = pool.submit(manager.commit_weights, staged, **arguments)
        wait_until(lambda: is_pause_wanted(manager))
        gate.open()
        commit.result(DEADLINE_S)


def test_kept_requests_go_on_over_their_keys_and_the_spans_say_so(model: PreTrainedModel, new_weights: Path) -> None:
    old = old_answer()
    with running(model) as manager:
        request_id, gate = begun_request(manager, model, 6)
        commit_at_gate(manager, gate, stage_weights(model, str(new_weights)), in_flight="keep")
        output = result_of(manager, request_id)
        assert output.generated_tokens[:6] == old[:6]
        assert output.weight_versions == (WeightSpan(1, 0, 6), WeightSpan(2, 6, NUM_NEW))
        # Its blocks mix versions: nobody may find them.
        again = result_of(manager, manager.add_request(PROMPT, max_new_tokens=NUM_NEW))
        assert (again.generated_tokens, again.num_cached_tokens) == (new_answer(), 0)


def test_recomputed_requests_go_on_as_a_fresh_run_on_the_new_weights(model: PreTrainedModel, new_weights: Path) -> None:
    old = old_answer()
    expected = old[:6] + new_answer(PROMPT + old[:6], NUM_NEW - 6)
    with running(model) as manager:
        request_id, gate = begun_request(manager, model, 6)
        commit_at_gate(manager, gate, stage_weights(model, str(new_weights)), in_flight="recompute")
        output = result_of(manager, request_id)
        assert output.generated_tokens == expected
        assert output.weight_versions == (WeightSpan(1, 0, 6), WeightSpan(2, 6, NUM_NEW))
        # Recomputed under one version, its blocks may be found.
        assert result_of(manager, manager.add_request(PROMPT, max_new_tokens=1)).num_cached_tokens == 64


def test_aborted_requests_end_with_what_they_have(model: PreTrainedModel, new_weights: Path) -> None:
    with running(model) as manager:
        request_id, gate = begun_request(manager, model, 6)
        waiting = manager.add_request([1, 2, 3], max_new_tokens=50)
        commit_at_gate(manager, gate, stage_weights(model, str(new_weights)), in_flight="abort")
        output = result_of(manager, request_id)
        assert (output.status, output.finish_reason) == (RequestStatus.CANCELLED, FinishReason.CANCELLED)
        assert output.generated_tokens == old_answer()[:6]
        assert result_of(manager, waiting).is_finished()
        assert run_all(manager, [PROMPT], NUM_NEW) == [new_answer()]


def test_a_second_commit_is_refused_and_does_not_bring_the_older_weights_back(
    model: PreTrainedModel, new_weights: Path
) -> None:
    new = new_answer()
    with running(model) as manager:
        staged = stage_weights(model, str(new_weights))
        manager.commit_weights(staged)
        with pytest.raises(WeightsError, match="committed"):
            manager.commit_weights(staged)
        assert manager.weight_version == 2
        assert run_all(manager, [PROMPT], NUM_NEW) == [new]


def test_weights_that_fail_to_commit_leave_the_old_ones_running(model: PreTrainedModel, new_weights: Path) -> None:
    old = old_answer()
    with running(model) as manager:
        assert run_all(manager, [PROMPT], NUM_NEW) == [old]
        staged = stage_weights(model, str(new_weights))
        index = next(index for index, (held, _) in enumerate(staged._pairs) if held.ndim == 1)
        held, spare = staged._pairs[index]
        staged._pairs[index] = (held, spare.to_sparse())
        with pytest.raises(RuntimeError, match="incompatible"):
            manager.commit_weights(staged)
        assert manager.weight_version == 1
        output = result_of(manager, manager.add_request(PROMPT, max_new_tokens=NUM_NEW))
        assert (output.generated_tokens, output.num_cached_tokens) == (old, 64)
        with pytest.raises(WeightsInvalid):
            stage_weights(tiny_model("llama", hidden_size=32), str(new_weights))


def test_used_up_weights_and_bad_arguments_are_refused(model: PreTrainedModel, new_weights: Path) -> None:
    with running(model) as manager:
        staged = stage_weights(model, str(new_weights))
        with pytest.raises(InvalidRequest, match="in_flight"):
            manager.commit_weights(staged, in_flight="drop")
        for version in (1, 0, -3):
            with pytest.raises(InvalidRequest, match="above the present one"):
                manager.commit_weights(staged, version=version)
        assert manager.weight_version == 1
        staged.discard()
        with pytest.raises(WeightsError, match="discarded"):
            manager.commit_weights(staged)
        assert manager.weight_version == 1
        assert run_all(manager, [PROMPT], NUM_NEW) == [old_answer()]


@pytest.mark.usefixtures("depth")
def test_versions_go_on_counting_after_a_restart(model: PreTrainedModel) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    manager.start()
    with manager.pause():
        pass
    manager.stop(timeout=DEADLINE_S)
    manager.start()
    output = result_of(manager, manager.add_request([1, 2], max_new_tokens=2))
    assert output.weight_versions == (WeightSpan(2, 0, 2),)
    manager.stop(timeout=DEADLINE_S)


# Starting and stopping


@pytest.mark.usefixtures("depth")
def test_stop_finishes_what_was_submitted(model: PreTrainedModel) -> None:
    expected = old_answer()
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    ids = [manager.add_request(PROMPT, max_new_tokens=NUM_NEW) for _ in range(5)]
    manager.start()
    manager.stop(timeout=DEADLINE_S)
    assert not manager.is_running()
    assert [result_of(manager, request_id).generated_tokens for request_id in ids] == [expected] * 5


def test_a_hard_stop_ends_requests_with_their_partial_tokens(model: PreTrainedModel) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config(max_requests_per_batch=1))
    manager.start()
    running_id, gate = begun_request(manager, model, 6)
    waiting_id = manager.add_request([1, 2, 3], max_new_tokens=50)
    manager.stop(hard_stop=True, block=False)
    gate.open()
    manager.join(time.perf_counter(), timeout=DEADLINE_S)
    output = result_of(manager, running_id)
    assert (output.status, output.finish_reason) == (RequestStatus.FAILED, FinishReason.FAILED)
    assert output.generated_tokens == old_answer()[:6]
    assert "stopped" in str(output.error)
    assert result_of(manager, waiting_id).generated_tokens == []
    stats = manager.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


@pytest.mark.usefixtures("depth")
def test_a_short_timeout_does_not_tear_down_a_loop_that_lives(model: PreTrainedModel) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    manager.start()
    request_id, gate = begun_request(manager, model, 3)
    manager.stop(timeout=0.01)
    assert manager.is_running()
    with pytest.raises(EngineStopped):
        manager.add_request([1, 2, 3], max_new_tokens=3)
    gate.open()
    assert result_of(manager, request_id).generated_tokens == old_answer()
    manager.join(time.perf_counter(), timeout=DEADLINE_S)
    assert not manager.is_running()


@pytest.mark.usefixtures("depth")
def test_a_manager_can_be_started_again(model: PreTrainedModel) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    for _ in range(3):
        manager.start()
        assert run_all(manager, [PROMPT], NUM_NEW) == [old_answer()]
        manager.stop(timeout=DEADLINE_S)
        with pytest.raises(EngineStopped):
            manager.add_request([1], max_new_tokens=1)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.usefixtures("depth")
def test_prefixes_survive_a_stop_when_asked_to(keep: bool, model: PreTrainedModel) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    manager.start()
    run_all(manager, [PROMPT], NUM_NEW)
    manager.stop(timeout=DEADLINE_S, keep_for_next_session=keep)
    manager.start()
    output = result_of(manager, manager.add_request(PROMPT, max_new_tokens=NUM_NEW))
    assert output.generated_tokens == old_answer()
    assert output.num_cached_tokens == (64 if keep else 0)
    manager.stop(timeout=DEADLINE_S)


CHANGES: dict[str, Callable[[PreTrainedModel], object]] = {
    "in place": lambda model: put_in_place(model),
    "through .data": lambda model: [
        own.data.copy_(new) for own, new in zip(model.parameters(), tiny_model(seed=2).parameters(), strict=True)
    ],
    "other tensors": lambda model: model.load_state_dict(tiny_model(seed=2).state_dict(), assign=True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("keep", [True, False])
def test_weights_that_are_changed_while_it_is_stopped_are_a_new_version(
    change: str, keep: bool, model: PreTrainedModel
) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    manager.start()
    assert run_all(manager, [PROMPT], NUM_NEW) == [old_answer()]
    manager.stop(timeout=DEADLINE_S, keep_for_next_session=keep)
    manager.stop(timeout=DEADLINE_S, keep_for_next_session=keep)
    CHANGES[change](model)
    manager.stop(timeout=DEADLINE_S, keep_for_next_session=keep)
    manager.start()
    assert manager.weight_version == 2
    output = result_of(manager, manager.add_request(PROMPT, max_new_tokens=NUM_NEW, weight_version=2))
    assert (output.generated_tokens, output.num_cached_tokens) == (new_answer(), 0)
    manager.stop(timeout=DEADLINE_S, keep_for_next_session=True)
    manager.start()
    output = result_of(manager, manager.add_request(PROMPT, max_new_tokens=NUM_NEW))
    assert (output.generated_tokens, output.num_cached_tokens) == (new_answer(), 64)
    assert manager.weight_version == 2
    manager.stop(timeout=DEADLINE_S)


def test_a_buffer_that_is_changed_while_it_is_stopped_starts_a_new_version(model: PreTrainedModel) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    manager.start()
    run_all(manager, [PROMPT], NUM_NEW)
    manager.stop(timeout=DEADLINE_S, keep_for_next_session=True)
    model.model.rotary_emb.inv_freq.mul_(0.5)
    expected = greedy(model, PROMPT, NUM_NEW)
    manager.start()
    assert run_all(manager, [PROMPT], NUM_NEW) == [expected]
    assert manager.weight_version == 2
    manager.stop(timeout=DEADLINE_S)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.usefixtures("depth")
def test_a_restarted_manager_keeps_no_loop_but_its_last(keep: bool, model: PreTrainedModel) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    loops, runners, threads = [], [], []
    for _ in range(4):
        manager.start()
        run_all(manager, [PROMPT], 2)
        loops.append(weakref.ref(manager._loop))
        runners.append(weakref.ref(manager._runner))
        threads.append(manager._thread)
        manager.stop(timeout=DEADLINE_S, keep_for_next_session=keep)
    gc.collect()
    assert {id(loop()) for loop in loops} - {id(None)} == {id(manager._loop)}
    assert {id(runner()) for runner in runners} - {id(None)} == {id(manager._runner)}
    last = loops[-1]
    del manager
    gc.collect()
    assert last() is None
    assert not any(thread is None or thread.is_alive() for thread in threads)


@pytest.mark.usefixtures("depth")
def test_a_model_that_is_cast_in_a_pause_is_refused_until_it_is_cast_back(model: PreTrainedModel) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    manager.start()
    added = []
    with pytest.raises(WeightsError, match=r"is torch.bfloat16 on cpu now and was torch.float32"):  # noqa: SIM117, PT012
        with manager.pause():
            added.append(manager.add_request(PROMPT, max_new_tokens=NUM_NEW))
            model.to(torch.bfloat16)
    (request_id,) = added
    assert "may not change under a manager" in str(result_of(manager, request_id).error)
    manager.join(0.0, timeout=DEADLINE_S)
    with pytest.raises(WeightsError, match=r"torch\.bfloat16"):
        manager.start()
    assert not manager.is_running()
    model.to(torch.float32)
    model.load_state_dict(tiny_model(seed=1).state_dict())
    manager.start()
    assert run_all(manager, [PROMPT], NUM_NEW) == [old_answer()]
    manager.stop(timeout=DEADLINE_S)


def test_a_destroyed_manager_stays_so(model: PreTrainedModel) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    manager.start()
    manager.destroy()
    manager.destroy()
    assert not manager.is_running()
    with pytest.raises(EngineStopped, match="destroyed"):
        manager.start()


def test_starting_twice_and_stopping_what_never_ran_only_warn(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    manager.stop()
    assert "never started" in caplog.text
    manager.start()
    manager.start()
    assert "already running" in caplog.text
    manager.stop(timeout=DEADLINE_S)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored(training: bool, model: PreTrainedModel) -> None:
    model.train(training)
    generate_batch(model, [PROMPT], max_new_tokens=2)
    assert model.training is training


@pytest.mark.usefixtures("depth")
def test_a_manager_that_nobody_holds_ends(model: PreTrainedModel) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    manager.start()
    thread = manager._thread
    assert thread is not None
    del manager
    gc.collect()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_forgotten_manager_does_not_keep_the_interpreter_alive(is_async: bool) -> None:
    script = f"""
        from tests.engine.tiny_models import tiny_model
        from engine import ContinuousBatchingConfig, init_continuous_batching
        config = ContinuousBatchingConfig(page_size=16, num_blocks=64, use_async_batching={is_async})
        manager = init_continuous_batching(tiny_model(), continuous_batching_config=config)
        manager.start()
        manager.add_request([1, 2, 3], max_new_tokens=400)
        raise SystemExit(3)
    """
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parents[2],
        timeout=4 * DEADLINE_S,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 3, finished.stderr
    assert "Traceback" not in finished.stderr


# Results


def test_a_result_is_awaited_by_id_without_touching_the_others(
    manager: ContinuousBatchingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    changed = manager._outbox._changed
    wait = changed.wait

    def count_wait(timeout: float | None = None) -> bool:
        waits.append(timeout)
        return wait(timeout)

    monkeypatch.setattr(changed, "wait", count_wait)
    ids = [manager.add_request([1, 2, i], max_new_tokens=3) for i in range(4)]
    last = manager.add_request(PROMPT, max_new_tokens=300)
    assert result_of(manager, last).request_id == last
    # The other results lie in front of it all the while: a reader that took them for news would look without an
    # end. What wakes it is an output, of which each of these requests has one.
    assert len(waits) <= len(ids) + 1
    assert [manager.get_result(timeout=DEADLINE_S).request_id for _ in ids] == ids  # type: ignore[union-attr]
    assert manager.get_result(timeout=0) is None


def test_a_timeout_is_waited_for_and_gives_none(manager: ContinuousBatchingManager) -> None:
    start = time.perf_counter()
    assert manager.get_result("unknown", timeout=0.1) is None
    assert manager.get_result(timeout=0.1) is None
    assert 0.2 <= time.perf_counter() - start < DEADLINE_S


def test_a_reader_returns_when_the_manager_ends(model: PreTrainedModel) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    assert manager.get_result() is None
    manager.start()
    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(manager.get_result), pool.submit(manager.get_result, "unknown")]
        manager.stop(timeout=DEADLINE_S)
        assert [reader.result(DEADLINE_S) for reader in readers] == [None, None]


@pytest.mark.usefixtures("depth")
def test_a_streaming_request_is_read_piece_by_piece(manager: ContinuousBatchingManager) -> None:
    expected = old_answer()
    request_id = manager.add_request(PROMPT, max_new_tokens=NUM_NEW, streaming=True, record_timestamps=True)
    pieces = list(manager.request_id_iter(request_id))
    assert [token for piece in pieces for token in piece.new_tokens] == expected
    assert [piece.is_finished() for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    last = pieces[-1]
    assert last.generated_tokens == expected
    assert last.timestamps is not None
    assert len(last.timestamps) == NUM_NEW
    assert last.timestamps == sorted(last.timestamps)
    assert last.created_time <= last.lifespan[0] <= last.timestamps[0] <= last.lifespan[1]


@pytest.mark.usefixtures("depth")
def test_iterating_gives_the_outputs_of_all_until_the_manager_stops(model: PreTrainedModel) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    ids = manager.add_requests([[1, 2], [3], PROMPT], max_new_tokens=4)
    manager.start()
    manager.stop(block=False)
    assert {output.request_id for output in manager} == set(ids)


async def test_a_handler_gets_each_piece_in_its_own_loop(manager: ContinuousBatchingManager) -> None:
    expected = old_answer()
    queue: asyncio.Queue[GenerationOutput] = asyncio.Queue()
    thread_ids = set()

    def callback(output: GenerationOutput) -> None:
        thread_ids.add(threading.get_ident())
        queue.put_nowait(output)

    manager.register_result_handler("mine", callback)
    manager.add_request(PROMPT, request_id="mine", max_new_tokens=NUM_NEW, streaming=True)
    tokens = []
    async with asyncio.timeout(DEADLINE_S):
        while not (output := await queue.get()).is_finished():
            tokens += output.new_tokens
    assert tokens + output.new_tokens == expected
    assert thread_ids == {threading.get_ident()}
    assert manager.get_result("mine", timeout=0) is None


async def test_a_handler_without_streaming_is_called_once(manager: ContinuousBatchingManager) -> None:
    expected = old_answer()
    outputs: list[GenerationOutput] = []
    ended = asyncio.Event()

    def callback(output: GenerationOutput) -> None:
        outputs.append(output)
        ended.set()

    manager.register_result_handler("mine", callback)
    manager.add_request(PROMPT, request_id="mine", max_new_tokens=NUM_NEW)
    async with asyncio.timeout(DEADLINE_S):
        await ended.wait()
    assert [output.generated_tokens for output in outputs] == [expected]


@pytest.mark.usefixtures("depth")
def test_handlers_of_two_event_loops_each_get_their_own(manager: ContinuousBatchingManager) -> None:
    prompts = [prompt_of(20, seed=seed) for seed in range(8)]
    expected = [old_answer(prompt) for prompt in prompts]

    def serve(numbers: list[int]) -> list[list[int]]:
        return asyncio.run(_collect(manager, [(f"r{i}", prompts[i]) for i in numbers]))

    with ThreadPoolExecutor(2) as pool:
        even, odd = pool.map(serve, [[0, 2, 4, 6], [1, 3, 5, 7]])
    assert even == expected[::2]
    assert odd == expected[1::2]


async def _collect(manager: ContinuousBatchingManager, requests: list[tuple[str, list[int]]]) -> list[list[int]]:
    """Streams all requests in this event loop and checks that every callback runs in it."""
    loop = asyncio.get_running_loop()
    tokens: dict[str, list[int]] = {request_id: [] for request_id, _ in requests}
    ended = {request_id: asyncio.Event() for request_id, _ in requests}

    def callback(output: GenerationOutput) -> None:
        assert asyncio.get_running_loop() is loop
        tokens[output.request_id] += output.new_tokens
        if output.is_finished():
            ended[output.request_id].set()

    for request_id, prompt in requests:
        manager.register_result_handler(request_id, callback)
        manager.add_request(prompt, request_id=request_id, max_new_tokens=NUM_NEW, streaming=True)
    async with asyncio.timeout(DEADLINE_S):
        for event in ended.values():
            await event.wait()
    return list(tokens.values())


def test_the_id_of_a_parent_is_free_again_when_its_last_child_has_ended(model: PreTrainedModel) -> None:
    with running(model, max_requests_per_batch=1) as manager:
        gate = StepGate(model)
        twice = SamplingParams(num_return_sequences=2, max_new_tokens=3)
        manager.add_request([1, 2, 3], "a", sampling=twice)
        gate.wait()
        for _ in range(4):  # the prompt but for its last token, then the parent's three tokens
            gate.step()
        assert result_of(manager, "a").finish_reason is FinishReason.LENGTH
        with pytest.raises(DuplicateRequest):
            manager.add_request([1, 2, 3], "a", max_new_tokens=1)
        gate.open()
        assert len(result_of(manager, "a__child#0").generated_tokens) == 3
        manager.add_request([1, 2, 3], "a", max_new_tokens=1)
        assert len(result_of(manager, "a").generated_tokens) == 1


# Entry points


def test_the_context_manager_starts_and_stops(model: PreTrainedModel) -> None:
    with continuous_batching_context_manager(model, continuous_batching_config=small_config()) as manager:
        assert manager.is_running()
        request_id = manager.add_request(PROMPT, max_new_tokens=NUM_NEW)
    assert not manager.is_running()
    assert result_of(manager, request_id).generated_tokens == old_answer()


def test_an_error_in_the_context_ends_requests_at_once(model: PreTrainedModel) -> None:
    added = []
    context = continuous_batching_context_manager(model, continuous_batching_config=small_config())
    with suppress(ZeroDivisionError), context as manager:
        added.append(manager.add_request(PROMPT, max_new_tokens=400))
        raise ZeroDivisionError
    assert not manager.is_running()
    assert result_of(manager, added[0]).status is RequestStatus.FAILED


def test_a_persistent_manager_is_kept_and_knows_its_prefixes(model: PreTrainedModel) -> None:
    arguments: dict[str, Any] = {
        "continuous_batching_config": small_config(),
        "max_new_tokens": NUM_NEW,
        "persistent_manager": True,
    }
    try:
        first = generate_batch(model, [PROMPT], **arguments)
        second = generate_batch(model, [PROMPT], **arguments)
    finally:
        destroy_cached_continuous_batching_manager(model)
    assert [output.generated_tokens for output in (*first.values(), *second.values())] == [old_answer()] * 2
    assert [output.num_cached_tokens for output in (*first.values(), *second.values())] == [0, 64]
    destroy_cached_continuous_batching_manager(model)


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_are_changed_between_calls_reach_a_kept_manager(change: str, model: PreTrainedModel) -> None:
    def call() -> GenerationOutput:
        (output,) = generate_batch(
            model,
            [PROMPT],
            continuous_batching_config=small_config(),
            max_new_tokens=NUM_NEW,
            persistent_manager=True,
        ).values()
        return output

    try:
        assert call().generated_tokens == old_answer()
        CHANGES[change](model)
        changed = call()
        assert (changed.generated_tokens, changed.num_cached_tokens) == (new_answer(), 0)
        assert call().num_cached_tokens == 64
        manager = init_continuous_batching(model)
        with manager.pause():
            model.load_state_dict(tiny_model(seed=1).state_dict())
        assert call().generated_tokens == old_answer()
        assert manager.weight_version == 3
    finally:
        destroy_cached_continuous_batching_manager(model)


def test_enable_gives_the_model_the_methods(model: PreTrainedModel) -> None:
    assert enable(model) is model
    results = model.generate_batch([PROMPT], max_new_tokens=NUM_NEW)
    assert [output.generated_tokens for output in results.values()] == [old_answer()]
    manager = model.init_continuous_batching(continuous_batching_config=small_config())
    assert isinstance(manager, ContinuousBatchingManager)


def test_no_prompts_give_no_results(model: PreTrainedModel) -> None:
    assert generate_batch(model, []) == {}
