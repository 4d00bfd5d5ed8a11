"""Weights change under a loop that is parked, and every request knows which version sampled its tokens."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
    wait_until,
)
from tiny_models import tiny_model
from transformers import PreTrainedModel

from engine import (
    ContinuousBatchingManager,
    EngineStopped,
    FinishReason,
    InvalidRequest,
    NotFinished,
    ParkedLoop,
    Patience,
    RequestStatus,
    SamplingParams,
    StagedWeights,
    SwapConflict,
    WeightsError,
    WeightSpan,
    WeightVersionGone,
)
from engine.live_weights import LiveWeights, StagingRequest
from engine.weights import digest_of, digest_of_all

PROMPT = prompt_of(70, seed=4)
OTHER = prompt_of(37, seed=5)
NUM_NEW = 24


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model(seed=1)


@pytest.fixture
def manager(model: PreTrainedModel, depth: int) -> Iterator[ContinuousBatchingManager]:
    with running(model) as manager:
        yield manager


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model(seed=2).save_pretrained(tmp_path / "new")
    return tmp_path / "new"


def answer(seed: int, prompt: list[int] = PROMPT, num_new: int = NUM_NEW) -> list[int]:
    return greedy(tiny_model(seed=seed), prompt, num_new)


@pytest.fixture
def background() -> Iterator[Callable[..., Future[object]]]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def begun(manager: ContinuousBatchingManager, gate: StepGate, **arguments: object) -> str:
    """Gives a request whose first step stands at the gate."""
    request_id = manager.add_request(PROMPT, max_new_tokens=NUM_NEW, **arguments)
    gate.wait()
    return request_id


# Parking


def test_a_park_is_held_across_threads_until_it_is_resumed(
    manager: ContinuousBatchingManager, folder: Path, background: Callable[..., Future[object]]
) -> None:
    staged = manager.stage_weights(folder)
    parked: ParkedLoop = background(manager.park).result(DEADLINE_S)  # type: ignore[assignment]
    request_id = manager.add_request(PROMPT, max_new_tokens=NUM_NEW)
    assert manager.stats().is_paused
    assert manager.get_result(request_id, timeout=0.05) is None
    background(parked.commit, staged, version=7).result(DEADLINE_S)
    assert manager.weight_version == 7
    assert manager.stats().is_paused
    first = background(parked.resume).result(DEADLINE_S)
    assert first == parked.resume() > 0
    assert not parked.is_parked
    assert result_of(manager, request_id).generated_tokens == answer(2)


def test_a_park_that_is_given_up_changes_nothing(manager: ContinuousBatchingManager, folder: Path) -> None:
    with manager.park() as parked:
        pass
    with pytest.raises(EngineStopped, match="over"):
        parked.commit(manager.stage_weights(folder), version=2)
    assert manager.weight_version == 1
    assert run_all(manager, [PROMPT], NUM_NEW) == [answer(1)]


def test_a_commit_that_fails_leaves_the_old_weights_and_the_park(
    manager: ContinuousBatchingManager, folder: Path
) -> None:
    staged, used = manager.stage_weights(folder), manager.stage_weights(folder)
    used.discard()
    with manager.park() as parked:
        with pytest.raises(WeightsError, match="discarded"):
            parked.commit(used)
        with pytest.raises(InvalidRequest, match="above"):
            parked.commit(staged, version=1)
        with pytest.raises(InvalidRequest, match="in_flight"):
            parked.commit(staged, in_flight="drop")
        with pytest.raises(InvalidRequest, match="parked with 'keep'"):
            parked.commit(staged, in_flight="finish")
        assert manager.stats().is_paused
        assert manager.weight_version == 1
    assert run_all(manager, [PROMPT], NUM_NEW) == [answer(1)]


def test_a_park_that_is_not_reached_in_time_holds_nothing(model: PreTrainedModel) -> None:
    with running(model) as manager:
        gate = StepGate(model)
        request_id = begun(manager, gate)
        with pytest.raises(WeightsError, match=r"no step ended within 0\.01 s"):
            manager.park(timeout_s=0.01, pinned="end")
        assert not is_pause_wanted(manager)
        gate.open()
        assert result_of(manager, request_id).generated_tokens == answer(1)


@pytest.mark.parametrize("is_given_up_before", [False, True])
@pytest.mark.parametrize(("in_flight", "pinned"), [("finish", "end"), ("keep", "finish"), ("keep", "end")])
def test_a_wait_for_a_park_ends_as_soon_as_it_is_given_up(
    model: PreTrainedModel,
    background: Callable[..., Future[object]],
    in_flight: str,
    pinned: str,
    is_given_up_before: bool,
) -> None:
    with running(model) as manager:
        gate = StepGate(model)
        first = begun(manager, gate, weight_version=1)
        patience = Patience()
        if is_given_up_before:
            patience.end()
        parking = background(manager.park, in_flight=in_flight, pinned=pinned, patience=patience)
        if not is_given_up_before:
            wait_until(lambda: is_pause_wanted(manager))
            patience.end()
        with pytest.raises(WeightsError, match="given up"):
            parking.result(DEADLINE_S)
        assert not is_pause_wanted(manager)
        late = manager.add_request(OTHER, max_new_tokens=1, weight_version=1)
        gate.step_until(lambda: sum(manager.stats().requests_total.values()) > 0)
        # The one that was to finish first still runs.
        assert result_of(manager, late).is_finished()
        gate.open()
        assert result_of(manager, first).generated_tokens == answer(1)


def test_stopping_ends_a_park(model: PreTrainedModel, folder: Path) -> None:
    with running(model) as manager:
        staged = manager.stage_weights(folder)
        request_id = manager.add_request(PROMPT, max_new_tokens=NUM_NEW)
        parked = manager.park()
        manager.stop(timeout=DEADLINE_S)
        assert not manager.is_running()
        assert result_of(manager, request_id).generated_tokens == answer(1)
        with pytest.raises(EngineStopped):
            parked.commit(staged)
        manager.start()


def test_a_manager_that_stops_just_after_the_loop_parked_ends_all_the_same(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model) as manager:
        acquire_pause = manager._loop.acquire_pause

        def acquire_and_stop(*arguments: Any, **options: Any) -> None:
            acquire_pause(*arguments, **options)
            manager.stop(block=False)

        monkeypatch.setattr(manager._loop, "acquire_pause", acquire_and_stop)
        with pytest.raises(EngineStopped):
            manager.park()
        manager.join(time.perf_counter(), DEADLINE_S)
        assert not manager.is_running()
        manager.start()


@pytest.mark.parametrize("arguments", [{"in_flight": "wait"}, {"pinned": "keep"}])
def test_unknown_choices_are_refused_before_anything_is_parked(
    model: PreTrainedModel, arguments: dict[str, str]
) -> None:
    with running(model) as manager:
        with pytest.raises(InvalidRequest, match="must be one of") as caught:
            manager.park(**arguments)
        assert caught.value.param in arguments
        assert not manager.stats().is_paused


def test_weights_are_committed_inside_the_own_pause(manager: ContinuousBatchingManager, folder: Path) -> None:
    staged = manager.stage_weights(folder)
    with manager.pause(weights_changed=False):
        manager.commit_weights(staged)
    assert run_all(manager, [PROMPT], NUM_NEW) == [answer(2)]


# Finishing first


@pytest.mark.parametrize("call", ["park", "settle"])
def test_who_holds_a_pause_waits_for_no_request_to_finish(
    model: PreTrainedModel, call: str, background: Callable[..., Future[object]]
) -> None:
    with running(model) as manager:
        gate = StepGate(model)
        first = begun(manager, gate, weight_version=1)

        def open_once_a_pause_is_wanted() -> None:
            wait_until(lambda: is_pause_wanted(manager))
            gate.open()

        background(open_once_a_pause_is_wanted)
        with manager.pause(weights_changed=False), pytest.raises(NotFinished):
            getattr(manager, call)()
        assert result_of(manager, first).generated_tokens == answer(1)


@pytest.mark.parametrize("in_flight", ["keep", "finish"])
def test_a_loop_goes_on_while_requests_finish_and_holds_their_kind_back_until_it_has_parked_or_resumed(
    model: PreTrainedModel, background: Callable[..., Future[object]], in_flight: str
) -> None:
    with running(model) as manager:
        gate = StepGate(model)
        first = begun(manager, gate, weight_version=1)
        settling = background(manager.settle, in_flight=in_flight)
        wait_until(lambda: is_pause_wanted(manager))
        held = manager.add_request(OTHER, max_new_tokens=NUM_NEW, weight_version=1)
        gate.open()
        settled: ParkedLoop = settling.result(DEADLINE_S)  # type: ignore[assignment]
        assert result_of(manager, first).generated_tokens == answer(1)
        assert not settled.is_parked
        assert not manager.stats().is_paused
        if in_flight == "keep":
            assert run_all(manager, [PROMPT], NUM_NEW) == [answer(1)]
        settled.park(DEADLINE_S)
        assert settled.is_parked
        assert manager.stats().num_waiting == 1
        assert settled.resume() > 0
        assert result_of(manager, held).generated_tokens == answer(1, OTHER)
        assert background(manager.settle, in_flight=in_flight).result(DEADLINE_S).resume() == 0.0  # type: ignore[attr-defined]
        assert not is_pause_wanted(manager)


def test_running_requests_finish_on_the_old_weights_and_waiting_ones_begin_on_the_new(
    model: PreTrainedModel, folder: Path, depth: int, background: Callable[..., Future[object]]
) -> None:
    with running(model, max_requests_per_batch=2) as manager:
        staged = manager.stage_weights(folder)
        gate = StepGate(model)
        first = begun(manager, gate)
        second = manager.add_request(OTHER, max_new_tokens=NUM_NEW)
        gate.step_until(lambda: manager.stats().num_running == 2)
        third = manager.add_request(PROMPT, max_new_tokens=NUM_NEW)
        commit = background(manager.commit_weights, staged, in_flight="finish")
        wait_until(lambda: is_pause_wanted(manager))
        late = manager.add_request(OTHER, max_new_tokens=NUM_NEW)
        gate.open()
        commit.result(DEADLINE_S)
        outputs = [result_of(manager, name) for name in (first, second, third, late)]
        assert [output.weight_versions for output in outputs] == [
            (WeightSpan(version, 0, NUM_NEW),) for version in (1, 1, 2, 2)
        ]
        assert [output.generated_tokens for output in outputs] == [
            answer(1),
            answer(1, OTHER),
            answer(2),
            answer(2, OTHER),
        ]


def test_preempted_requests_finish_first_too(
    model: PreTrainedModel, folder: Path, depth: int, background: Callable[..., Future[object]]
) -> None:
    # Room for one of them at its full length and a part of the others.
    with running(model, num_blocks=8, allow_block_sharing=False) as manager:
        staged = manager.stage_weights(folder)
        gate = StepGate(model)
        prompts = [prompt_of(30, seed=seed) for seed in range(3)]
        names = [manager.add_request(prompt, max_new_tokens=60) for prompt in prompts]
        gate.wait()
        gate.step_until(lambda: manager.stats().preemptions_total > 0)
        commit = background(manager.commit_weights, staged, in_flight="finish")
        wait_until(lambda: is_pause_wanted(manager))
        gate.open()
        commit.result(DEADLINE_S)
        outputs = [result_of(manager, name) for name in names]
        assert [output.weight_versions for output in outputs] == [(WeightSpan(1, 0, 60),)] * 3
        assert [output.generated_tokens for output in outputs] == [answer(1, prompt, 60) for prompt in prompts]


def test_who_does_not_finish_in_time_keeps_the_old_weights(model: PreTrainedModel, folder: Path) -> None:
    with running(model) as manager:
        staged = manager.stage_weights(folder)
        gate = StepGate(model)
        first = begun(manager, gate)
        waiting = manager.add_request(OTHER, max_new_tokens=NUM_NEW)
        with pytest.raises(NotFinished, match=r"the running requests did not finish within 0\.01 s"):
            manager.commit_weights(staged, in_flight="finish", finish_timeout_s=0.01)
        gate.open()
        assert result_of(manager, first).generated_tokens == answer(1)
        assert result_of(manager, waiting).generated_tokens == answer(1, OTHER)
        assert manager.weight_version == 1
        manager.commit_weights(staged)
        assert run_all(manager, [PROMPT], NUM_NEW) == [answer(2)]


def test_stopping_while_requests_finish_ends_the_wait_and_finishes_the_held_back_too(
    model: PreTrainedModel, folder: Path, background: Callable[..., Future[object]]
) -> None:
    with running(model) as manager:
        staged = manager.stage_weights(folder)
        gate = StepGate(model)
        first = begun(manager, gate)
        commit = background(manager.commit_weights, staged, in_flight="finish")
        wait_until(lambda: is_pause_wanted(manager))
        waiting = manager.add_request(OTHER, max_new_tokens=NUM_NEW)
        manager.stop(block=False)
        with pytest.raises(EngineStopped, match="stopped"):
            commit.result(DEADLINE_S)
        gate.open()
        manager.join(0.0, timeout=DEADLINE_S)
        assert result_of(manager, first).generated_tokens == answer(1)
        assert result_of(manager, waiting).generated_tokens == answer(1, OTHER)
        manager.start()


# Pins


def test_a_pin_to_another_version_is_refused_by_name(manager: ContinuousBatchingManager, folder: Path) -> None:
    for version in (0, 2):
        with pytest.raises(WeightVersionGone, match=f"pinned to weight version {version}, and 1 is served"):
            manager.add_request(PROMPT, max_new_tokens=1, weight_version=version)
    for value in (True, "1", 1.0):
        with pytest.raises(InvalidRequest, match="must be an integer"):
            manager.add_request(PROMPT, max_new_tokens=1, weight_version=value)  # type: ignore[arg-type]
    assert run_all(manager, [PROMPT], NUM_NEW, weight_version=1) == [answer(1)]
    manager.commit_weights(manager.stage_weights(folder), version=5)
    assert run_all(manager, [PROMPT], NUM_NEW, weight_version=5) == [answer(2)]


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "abort", "finish"])
def test_pinned_requests_finish_and_those_that_wait_end(
    in_flight: str, model: PreTrainedModel, folder: Path, depth: int, background: Callable[..., Future[object]]
) -> None:
    with running(model, max_requests_per_batch=2) as manager:
        staged = manager.stage_weights(folder)
        gate = StepGate(model)
        pinned = begun(manager, gate, weight_version=1)
        free = manager.add_request(PROMPT, max_new_tokens=200)
        gate.step_until(lambda: manager.stats().num_running == 2)
        waiting = manager.add_request(OTHER, max_new_tokens=NUM_NEW, weight_version=1)
        commit = background(manager.commit_weights, staged, in_flight=in_flight)
        wait_until(lambda: is_pause_wanted(manager))
        late = manager.add_request(OTHER, max_new_tokens=NUM_NEW, weight_version=1)
        gate.open()
        commit.result(DEADLINE_S)
        output = result_of(manager, pinned)
        assert output.generated_tokens == answer(1)
        assert output.weight_versions == (WeightSpan(1, 0, NUM_NEW),)
        for name in (waiting, late):
            output = result_of(manager, name)
            assert (output.finish_reason, output.status) == (
                FinishReason.WEIGHT_VERSION_GONE,
                RequestStatus.CANCELLED,
            )
            assert (list(output.generated_tokens), output.error) == ([], "weight version 2 is served now")
        versions = [span.version for span in result_of(manager, free).weight_versions]
        assert versions == {"keep": [1, 2], "recompute": [1, 2], "abort": [1], "finish": [1]}[in_flight]


def test_running_pinned_requests_end_with_what_they_have_where_the_swap_says_so(
    model: PreTrainedModel, folder: Path, depth: int, background: Callable[..., Future[object]]
) -> None:
    with running(model) as manager:
        staged = manager.stage_weights(folder)
        gate = StepGate(model)
        pinned = begun(manager, gate, weight_version=1, sampling=SamplingParams(num_return_sequences=3, seed=3))
        free = manager.add_request(PROMPT, max_new_tokens=100)
        for _ in range(6):
            gate.step()
        commit = background(manager.commit_weights, staged, pinned="end")
        wait_until(lambda: is_pause_wanted(manager))
        gate.open()
        commit.result(DEADLINE_S)
        family = [result_of(manager, name) for name in (pinned, f"{pinned}__child#0", f"{pinned}__child#1")]
        assert [output.finish_reason for output in family] == [FinishReason.WEIGHT_VERSION_GONE] * 3
        assert all(0 < len(output.generated_tokens) < NUM_NEW for output in family)
        assert [span.version for span in result_of(manager, free).weight_versions] == [1, 2]
        assert manager.stats().requests_total["weight_version_gone"] == 3


def test_pinned_requests_that_find_the_version_gone_when_they_are_taken_in_end(
    manager: ContinuousBatchingManager, folder: Path
) -> None:
    staged = manager.stage_weights(folder)
    with manager.park() as parked:
        # Checked against the version of before, and taken in after the commit.
        pinned = manager.add_request(
            PROMPT, max_new_tokens=4, weight_version=1, sampling=SamplingParams(num_return_sequences=2)
        )
        parked.commit(staged)
    for name in (pinned, f"{pinned}__child#0"):
        assert result_of(manager, name).finish_reason is FinishReason.WEIGHT_VERSION_GONE


def test_a_pause_that_changes_weights_ends_pinned_requests(model: PreTrainedModel) -> None:
    with running(model) as manager:
        with manager.pause():
            pinned = manager.add_request(PROMPT, max_new_tokens=4, weight_version=1)
        assert result_of(manager, pinned).finish_reason is FinishReason.WEIGHT_VERSION_GONE


def test_cancelled_while_held_back_a_request_ends_at_once(
    model: PreTrainedModel, folder: Path, background: Callable[..., Future[object]]
) -> None:
    with running(model) as manager:
        staged = manager.stage_weights(folder)
        gate = StepGate(model)
        first = begun(manager, gate)
        commit = background(manager.commit_weights, staged, in_flight="finish")
        wait_until(lambda: is_pause_wanted(manager))
        waiting = manager.add_request(OTHER, max_new_tokens=NUM_NEW)
        gate.step_until(lambda: manager.stats().num_waiting == 1)
        manager.cancel_request(waiting)
        gate.open()
        assert result_of(manager, waiting).status is RequestStatus.CANCELLED
        commit.result(DEADLINE_S)
        assert result_of(manager, first).generated_tokens == answer(1)


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_log_probabilities_are_those_of_the_weights_that_sampled(
    in_flight: str, model: PreTrainedModel, folder: Path, depth: int, background: Callable[..., Future[object]]
) -> None:
    with running(model, return_logprobs=True) as manager:
        staged = manager.stage_weights(folder)
        gate = StepGate(model)
        request_id = begun(manager, gate)
        for _ in range(5):
            gate.step()
        commit = background(manager.commit_weights, staged, in_flight=in_flight)
        wait_until(lambda: is_pause_wanted(manager))
        gate.open()
        commit.result(DEADLINE_S)
        output = result_of(manager, request_id)
        old, new = output.weight_versions
        tokens = list(output.generated_tokens)
        assert output.logprobs[: old.end] == pytest.approx(log_probabilities(1, tokens[: old.end]), abs=1e-4)
        fresh = log_probabilities(2, tokens)[new.start :]
        if in_flight == "recompute":
            assert output.logprobs[new.start :] == pytest.approx(fresh, abs=1e-4)
        else:  # the first of the new weights' tokens come from keys and values of the old ones
            assert output.logprobs[new.start] != pytest.approx(fresh[0], abs=1e-4)
            assert output.logprobs[new.start] != pytest.approx(log_probabilities(1, tokens)[new.start], abs=1e-4)


def log_probabilities(seed: int, tokens: list[int]) -> list[float]:
    ids = torch.tensor([PROMPT + tokens])
    with torch.no_grad():
        logits = tiny_model(seed=seed)(ids).logits[0, len(PROMPT) - 1 : -1]
    found: list[float] = torch.log_softmax(logits, -1).gather(1, ids[0, len(PROMPT) :, None])[:, 0].tolist()
    return found


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "finish", "abort"])
def test_no_block_of_before_a_swap_is_found_after_it(
    in_flight: str, model: PreTrainedModel, folder: Path, depth: int, background: Callable[..., Future[object]]
) -> None:
    with running(model) as manager:
        staged = manager.stage_weights(folder)
        gate = StepGate(model)
        request_id = begun(manager, gate)
        for _ in range(5):
            gate.step()
        commit = background(manager.commit_weights, staged, in_flight=in_flight)
        wait_until(lambda: is_pause_wanted(manager))
        gate.open()
        commit.result(DEADLINE_S)
        first = result_of(manager, request_id)
        # With what was generated as well: those blocks mix versions.
        longer = PROMPT + list(first.generated_tokens)
        for prompt in (PROMPT, longer):
            assert run_all(manager, [prompt], 4) == [answer(2, prompt, 4)]


def test_all_samples_of_a_pinned_prompt_finish(
    model: PreTrainedModel, folder: Path, depth: int, background: Callable[..., Future[object]]
) -> None:
    with running(model, max_requests_per_batch=2) as manager:
        staged = manager.stage_weights(folder)
        gate = StepGate(model)
        # Room for two of the four at a time: the others wait in line when the swap begins.
        pinned = begun(manager, gate, weight_version=1, sampling=SamplingParams(num_return_sequences=4, seed=3))
        for _ in range(4):
            gate.step()
        commit = background(manager.commit_weights, staged)
        wait_until(lambda: is_pause_wanted(manager))
        gate.open()
        commit.result(DEADLINE_S)
        for name in (pinned, *(f"{pinned}__child#{index}" for index in range(3))):
            output = result_of(manager, name)
            assert output.weight_versions == (WeightSpan(1, 0, NUM_NEW),)


class FailingLoop:
    """A loop that is parked and cannot start a version."""

    is_running = True
    is_stopping = False
    is_generating = False

    def acquire_pause(
        self, timeout_s: float | None = None, *, hold: object = None, patience: object = None
    ) -> None: ...

    def settle(self, hold: object, timeout_s: float | None = None, *, patience: object = None) -> None: ...

    def release_pause(self, *, hold: object = None) -> None: ...

    def change_version(self, version: int, *, in_flight: str) -> None:  # noqa: ARG002  # the interface of a loop
        raise RuntimeError("no version")

    def fail(self, error: BaseException) -> None: ...


def test_in_place_the_weights_of_this_moment_come_back_not_those_of_staging(
    model: PreTrainedModel, folder: Path
) -> None:
    weights = LiveWeights(model, ranks=None, packed=None, in_place=True, free_bytes=lambda: 1 << 40)
    weights.loop = FailingLoop()
    staged = weights.stage(StagingRequest(folder))
    assert staged.old_version == 1
    model.model.norm.weight.data.mul_(2.0)
    weights.version = 2
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with (
        weights.park(timeout_s=None, in_flight="keep", pinned="end") as parked,
        pytest.raises(RuntimeError, match="no version"),
    ):
        parked.commit(staged)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# Digests


def test_digests_of_what_is_served_are_those_that_were_staged(
    manager: ContinuousBatchingManager, model: PreTrainedModel, folder: Path
) -> None:
    before = manager.weight_digests()
    assert before == {name: digest_of(tensor) for name, tensor in model.state_dict().items()}
    staged = manager.stage_weights(folder)
    assert before == manager.weight_digests() != staged.digests
    manager.commit_weights(staged)
    assert manager.weight_digests() == staged.digests


def test_digests_are_read_beside_commits_and_belong_to_one_version(
    manager: ContinuousBatchingManager, model: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "old")
    known = {manager.stage_weights(path).digest: path for path in (folder, tmp_path / "old")}
    stop = threading.Event()
    seen = set()

    def swap() -> None:
        for path in [folder, tmp_path / "old"] * 10:
            staged = manager.stage_weights(path)
            manager.commit_weights(staged)
            staged.discard()
        stop.set()

    with ThreadPoolExecutor(1) as pool:
        swapping = pool.submit(swap)
        while not stop.is_set() and not swapping.done():
            try:
                digests = manager.weight_digests()
            except SwapConflict:
                continue
            seen.add(digest_of_all(digests))
        swapping.result(DEADLINE_S)
    assert seen <= known.keys()
    assert seen


def test_a_partial_update_belongs_to_the_version_it_was_staged_on(
    manager: ContinuousBatchingManager, folder: Path, tmp_path: Path
) -> None:
    partial: StagedWeights = manager.stage_weights(folder, partial=True)
    manager.commit_weights(manager.stage_weights(folder))
    with pytest.raises(SwapConflict, match="part of version 1, and version 2 is served"):
        manager.commit_weights(partial)
    manager.commit_weights(manager.stage_weights(folder, partial=True))
    assert manager.weight_version == 3
