"""Swap sessions: buckets in order and once, leases, one commit, and nothing left behind. A fake clock, no Ray."""

import asyncio
import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine import InvalidRequest, QueueFull, SwapConflict, WeightsError, WeightsInvalid, WeightsSourceError
from serve_app.messages import CommittedVersion, SwapRequest, WeightSource
from serve_app.protocol.errors import SwapSessionGone
from serve_app.weights.history import WeightHistory
from serve_app.weights.store import FolderWriter
from serve_app.weights.swap_sessions import MAX_LAYERS, MAX_OPEN_SESSIONS, SwapSessions
from serve_app.weights.tensor_pieces import TensorPiece
from tests.serve_app.session_fakes import LEASE_S, Fleet, bucket, request


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


async def test_what_was_put_is_committed_as_one_swap_and_stays_readable(fleet: Fleet) -> None:
    await fleet.open()
    assert await fleet.put(0, w=torch.arange(4.0)) == 1
    assert await fleet.put(1, v=torch.ones(2)) == 2
    result = await fleet.sessions.commit("one")
    assert result.version == 2
    assert fleet.history.newest.label == "step 7"
    assert torch.equal(fleet.newest()["w"], torch.arange(4.0))
    assert torch.equal(fleet.newest()["v"], torch.ones(2))


async def test_the_same_bucket_again_changes_nothing_and_a_gap_is_refused(fleet: Fleet) -> None:
    await fleet.open()
    await fleet.put(0, w=torch.zeros(4))
    assert await fleet.put(0, w=torch.ones(4)) == 1
    with pytest.raises(InvalidRequest, match="bucket 2 came where 1 is next"):
        await fleet.put(2, v=torch.zeros(1))
    assert await fleet.put(1, v=torch.zeros(1)) == 2
    await fleet.sessions.commit("one")
    assert torch.equal(fleet.newest()["w"], torch.zeros(4))


async def test_opening_and_committing_twice_is_the_same_as_once(fleet: Fleet) -> None:
    await fleet.open()
    await fleet.put(0, w=torch.zeros(4))
    assert (await fleet.sessions.open(request())).next_sequence == 1
    first, second = await asyncio.gather(fleet.sessions.commit("one"), fleet.sessions.commit("one"))
    assert first == second == await fleet.sessions.commit("one")
    assert fleet.num_swaps == 1


async def test_a_caller_that_goes_away_does_not_stop_the_commit(fleet: Fleet) -> None:
    await fleet.open()
    await fleet.put(0, w=torch.zeros(4))
    fleet.may_swap.clear()
    caller = asyncio.ensure_future(fleet.sessions.commit("one"))
    await fleet.swapping.wait()
    caller.cancel()
    with pytest.raises(InvalidRequest, match="is being committed"):
        await fleet.put(1, v=torch.zeros(1))
    with pytest.raises(SwapConflict, match="is being committed"):
        await fleet.sessions.abort("one")
    fleet.may_swap.set()
    assert (await fleet.sessions.commit("one")).version == 2
    assert fleet.num_swaps == 1


async def test_aborting_removes_what_was_sent(fleet: Fleet) -> None:
    await fleet.open()
    await fleet.put(0, w=torch.zeros(4))
    await fleet.sessions.abort("one")
    await fleet.sessions.abort("one")
    assert fleet.left() == []
    with pytest.raises(SwapSessionGone, match="its owner aborted it"):
        await fleet.put(1, v=torch.zeros(1))
    with pytest.raises(SwapSessionGone):
        await fleet.sessions.commit("one")


class SlowBucket:
    """A bucket that comes only when it may; `tensors` None is one that cannot be read then."""

    def __init__(self, tensors: dict[str, torch.Tensor] | None) -> None:
        self._tensors = tensors
        self.may_come = threading.Event()

    def __call__(self) -> Iterable[TensorPiece]:
        assert self.may_come.wait(30)
        if self._tensors is None:
            raise OSError("gone")
        return bucket(**self._tensors)()


async def test_an_abort_that_waits_for_a_bucket_is_refused_once_the_session_is_being_committed(fleet: Fleet) -> None:
    slow = SlowBucket({"w": torch.ones(4)})
    await fleet.open()
    put = asyncio.ensure_future(fleet.sessions.put("one", 0, slow))
    await asyncio.sleep(0)
    abort = asyncio.ensure_future(fleet.sessions.abort("one"))
    await asyncio.sleep(0)
    commit = asyncio.ensure_future(fleet.sessions.commit("one"))
    await asyncio.sleep(0)
    slow.may_come.set()
    await put
    with pytest.raises(SwapConflict, match="is being committed"):
        await abort
    assert (await commit).version == 2
    assert torch.equal(fleet.newest()["w"], torch.ones(4))


async def test_a_commit_that_waits_for_a_bucket_says_why_the_session_has_ended(fleet: Fleet) -> None:
    slow = SlowBucket(None)
    ends: list[str] = []
    fleet.on_end = ends.append
    await fleet.open()
    put = asyncio.ensure_future(fleet.sessions.put("one", 0, slow))
    await asyncio.sleep(0)
    commit = asyncio.ensure_future(fleet.sessions.commit("one"))
    await asyncio.sleep(0)
    slow.may_come.set()
    with pytest.raises(WeightsError, match="not taken"):
        await put
    with pytest.raises(SwapSessionGone, match="not taken"):
        await commit
    assert ends == ["one"]
    assert fleet.num_swaps == 0


async def test_a_folder_that_was_just_sealed_is_not_pruned(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, is_sealed, may_go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    seal = FolderWriter.seal

    def slow_seal(writer: FolderWriter) -> str:
        folder = seal(writer)
        loop.call_soon_threadsafe(is_sealed.set)
        assert may_go_on.wait(30)
        return folder

    monkeypatch.setattr(FolderWriter, "seal", slow_seal)
    await fleet.open()
    await fleet.put(0, w=torch.ones(4))
    commit = asyncio.ensure_future(fleet.sessions.commit("one"))
    await is_sealed.wait()
    await fleet.sessions.prune()
    may_go_on.set()
    await commit
    assert torch.equal(fleet.newest()["w"], torch.ones(4))


async def test_a_session_whose_owner_is_silent_is_aborted(fleet: Fleet) -> None:
    await fleet.open()
    await fleet.open("two")
    await fleet.put(0, w=torch.zeros(4))
    fleet.now = LEASE_S - 1
    await fleet.sessions.renew("two")
    fleet.now = LEASE_S + 1
    await fleet.sessions.expire()
    with pytest.raises(SwapSessionGone, match="not heard of for 10 s"):
        await fleet.sessions.renew("one")
    await fleet.put(0, "two", w=torch.zeros(4))
    await fleet.sessions.abort("two")
    assert fleet.left() == []


async def test_a_session_that_fails_to_end_does_not_keep_the_others_from_ending(fleet: Fleet) -> None:
    ends: list[str] = []

    def on_end(session_id: str) -> None:
        ends.append(session_id)
        raise OSError("the receiver does not end")

    fleet.on_end = on_end
    for session_id in ("one", "two"):
        await fleet.open(session_id)
        await fleet.put(0, session_id, w=torch.zeros(4))
    fleet.now = LEASE_S + 1
    await fleet.sessions.expire()
    assert ends == ["one", "two"]
    assert fleet.left() == []
    with pytest.raises(SwapSessionGone, match="not heard of for 10 s"):
        await fleet.sessions.renew("two")


async def test_a_commit_outlives_the_lease(fleet: Fleet) -> None:
    await fleet.open()
    await fleet.put(0, w=torch.zeros(4))
    fleet.may_swap.clear()
    commit = asyncio.ensure_future(fleet.sessions.commit("one"))
    await fleet.swapping.wait()
    fleet.now = 10 * LEASE_S
    await fleet.sessions.expire()
    fleet.may_swap.set()
    assert (await commit).version == 2


async def test_refused_weights_end_the_session_and_leave_nothing(fleet: Fleet) -> None:
    await fleet.open()
    await fleet.put(0, w=torch.zeros(4))
    fleet.error = WeightsInvalid("w is not finite", tensor="w")
    for _ in range(2):
        with pytest.raises(WeightsInvalid, match="not finite"):
            await fleet.sessions.commit("one")
    assert fleet.left() == []
    assert fleet.num_swaps == 1


async def test_after_a_conflict_the_session_may_be_committed_again(fleet: Fleet) -> None:
    await fleet.open()
    await fleet.put(0, w=torch.zeros(4))
    fleet.error = SwapConflict("swap 1 is under way")
    with pytest.raises(SwapConflict):
        await fleet.sessions.commit("one")
    await fleet.sessions.prune()
    fleet.error = None
    assert (await fleet.sessions.commit("one")).version == 2
    assert fleet.newest().keys() == {"w"}


async def test_a_key_that_brought_weights_gives_their_result(fleet: Fleet) -> None:
    await fleet.open(key="step-7")
    await fleet.put(0, w=torch.zeros(4))
    result = await fleet.sessions.commit("one")
    again = await fleet.sessions.open(request("two", key="step-7"))
    assert again.result == result
    assert fleet.sessions.num_open == 0


async def test_a_key_of_another_kind_of_swap_is_a_conflict(fleet: Fleet) -> None:
    await fleet.swap(SwapRequest(WeightSource("/somewhere/else"), idempotency_key="step-7"))
    with pytest.raises(SwapConflict, match="brought version 2"):
        await fleet.open(key="step-7")


@pytest.mark.parametrize("broken", ["other content", "lost object"])
async def test_a_bucket_that_cannot_be_taken_ends_the_session(fleet: Fleet, broken: str) -> None:
    def lost() -> Iterable[TensorPiece]:
        raise OSError("gone")

    await fleet.open()
    await fleet.put(0, w=torch.zeros(4))
    load = lost if broken == "lost object" else bucket(w=torch.ones(4))
    with pytest.raises(WeightsError):
        await fleet.sessions.put("one", 1, load)
    assert fleet.left() == []
    with pytest.raises(SwapSessionGone):
        await fleet.sessions.renew("one")


async def test_an_error_that_is_remembered_keeps_no_bucket(fleet: Fleet) -> None:
    await fleet.open()
    await fleet.put(0, w=torch.zeros(4))
    pieces = list(bucket(w=torch.ones(4))())
    kept = weakref.ref(pieces[0].data)
    with contextlib.suppress(WeightsInvalid):
        await fleet.sessions.put("one", 1, functools.partial(pieces.copy))
    del pieces
    gc.collect()
    assert kept() is None


async def test_sessions_and_their_bytes_are_bounded(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, max_bytes=100)
    for number in range(MAX_OPEN_SESSIONS):
        await fleet.open(str(number))
    with pytest.raises(QueueFull, match="4 swap sessions are open"):
        await fleet.open("one more")
    await fleet.put(0, "0", w=torch.zeros(20))
    with pytest.raises(WeightsError, match=r"160 bytes and may hold 100; raise weights\.session_bytes"):
        await fleet.put(0, "1", w=torch.zeros(20))
    assert fleet.sessions.num_open == MAX_OPEN_SESSIONS - 1


@pytest.mark.parametrize("lease_s", [0.0, 1e9, float("nan")])
async def test_a_lease_out_of_bounds_is_refused(fleet: Fleet, lease_s: float) -> None:
    with pytest.raises(InvalidRequest, match="lease_s"):
        await fleet.open(lease_s=lease_s)


@pytest.mark.parametrize("option", [{"in_flight": "kep"}, {"strategy": "fast"}, {"label": 7}, {"key": "\ud800"}])
async def test_an_option_that_no_swap_takes_is_refused_before_anything_is_sent(
    fleet: Fleet, option: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match=str(next(iter(option)))):
        await fleet.open(**option)
    assert fleet.sessions.num_open == 0


async def test_a_session_nobody_knows_is_gone(fleet: Fleet) -> None:
    with pytest.raises(SwapSessionGone, match="may have been restarted"):
        await fleet.put(0, w=torch.zeros(1))


async def test_old_versions_leave_the_store_and_the_newest_stays(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, history_bytes=1)
    for number in range(3):
        await fleet.open(str(number))
        await fleet.put(0, str(number), w=torch.full((4,), float(number)))
        await fleet.sessions.commit(str(number))
    assert len(fleet.left()) == 1
    assert torch.equal(fleet.newest()["w"], torch.full((4,), 2.0))


async def test_a_controller_that_was_replaced_prunes_nothing(tmp_path: Path) -> None:
    def history() -> WeightHistory:
        return WeightHistory(application="pitstop", model="base", folder=str(tmp_path), num_earlier=16)

    fleet = Fleet(tmp_path)
    fleet.history = history()
    fleet.sessions = SwapSessions(fleet.store, fleet.history, fleet.swap, max_bytes=2**30, base_path=str)
    await fleet.open()
    await fleet.put(0, w=torch.zeros(4))
    await fleet.sessions.commit("one")
    history()
    other = fleet.store.begin()
    other.append(bucket(w=torch.ones(4))())
    other.seal()
    await fleet.sessions.prune()
    assert len(fleet.store.sealed()) == 2


@pytest.fixture
def base(fleet: Fleet, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The weights that the application was started with."""
    tensors = {name: torch.zeros(4) for name in ("w", "v", "u")}
    fleet.base = str(tmp_path / "base")
    Path(fleet.base).mkdir()
    save_file(tensors, Path(fleet.base) / "model.safetensors")
    return tensors


async def test_partial_updates_pile_up_to_a_bound_and_then_are_made_whole(
    fleet: Fleet, base: dict[str, torch.Tensor]
) -> None:
    heights = []
    for number in range(2 * MAX_LAYERS + 1):
        name, value = ("w", "v")[number % 2], torch.full((4,), float(number))
        await fleet.open(str(number), partial=True)
        await fleet.put(0, str(number), **{name: value})
        result = await fleet.sessions.commit(str(number))
        base[name] = value
        source = fleet.history.newest.source
        assert source is not None
        heights.append(len(source.folders))
        assert result.unchanged == (sorted({"u", "v", "w"} - {name}) if source.path else [])
        assert all(torch.equal(tensor, base[name]) for name, tensor in fleet.newest().items())
        assert fleet.newest().keys() == base.keys()
    assert heights == [*range(1, MAX_LAYERS + 1), *range(1, MAX_LAYERS + 1), 1]


async def test_the_layers_below_stay_while_a_version_needs_them(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, history_bytes=1)
    await fleet.open("whole")
    await fleet.put(0, "whole", w=torch.zeros(4), v=torch.zeros(4))
    await fleet.sessions.commit("whole")
    for number in range(3):
        await fleet.open(str(number), partial=True)
        await fleet.put(0, str(number), w=torch.full((4,), float(number)))
        await fleet.sessions.commit(str(number))
    assert len(fleet.left()) == 4
    assert torch.equal(fleet.newest()["w"], torch.full((4,), 2.0))
    await fleet.open("whole again")
    await fleet.put(0, "whole again", w=torch.ones(4), v=torch.ones(4))
    await fleet.sessions.commit("whole again")
    assert len(fleet.left()) == 1


async def test_changes_to_weights_that_are_served_no_more_are_refused(
    fleet: Fleet, base: dict[str, torch.Tensor]
) -> None:
    for session_id in ("one", "two"):
        await fleet.open(session_id, partial=True)
        await fleet.put(0, session_id, w=torch.ones(4))
    await fleet.sessions.commit("one")
    with pytest.raises(SwapConflict, match="changes to version 1; begin again"):
        await fleet.sessions.commit("two")
    await fleet.sessions.abort("two")
    assert len(fleet.left()) == 1


async def test_changes_that_wait_for_their_turn_while_another_version_is_committed_are_refused(
    fleet: Fleet, base: dict[str, torch.Tensor]
) -> None:
    fleet.may_swap.clear()
    await fleet.open(partial=True)
    await fleet.put(0, w=torch.ones(4))
    commit = asyncio.ensure_future(fleet.sessions.commit("one"))
    await fleet.swapping.wait()
    await fleet.history.commit(CommittedVersion(2, WeightSource("/other")))
    fleet.may_swap.set()
    with pytest.raises(SwapConflict, match="changes to version 1; begin again"):
        await commit
    assert fleet.history.newest.version == 2


@pytest.mark.parametrize("is_over_configured", [True, False])
async def test_what_is_filled_from_the_layers_below_is_cast_as_they_were(
    fleet: Fleet, base: dict[str, torch.Tensor], is_over_configured: bool
) -> None:
    if not is_over_configured:
        await fleet.open("whole")
        await fleet.put(0, "whole", **base)
        await fleet.sessions.commit("whole")
    while len(fleet.asked) <= MAX_LAYERS:
        number = str(len(fleet.asked))
        await fleet.open(number, partial=True)
        await fleet.put(0, number, w=torch.ones(4))
        await fleet.sessions.commit(number)
    assert not fleet.asked[-1].partial
    assert fleet.asked[-1].cast == fleet.history.newest.cast == is_over_configured
    assert not any(request.cast for request in fleet.asked[:-1])


async def test_a_layer_that_is_gone_refuses_the_update_and_leaves_nothing(
    fleet: Fleet, base: dict[str, torch.Tensor]
) -> None:
    for number in range(MAX_LAYERS):
        await fleet.open(str(number), partial=True)
        await fleet.put(0, str(number), w=torch.full((4,), float(number)))
        await fleet.sessions.commit(str(number))
    (Path(fleet.base) / "model.safetensors").unlink()
    await fleet.open(partial=True)
    await fleet.put(0, w=torch.ones(4))
    with pytest.raises(WeightsSourceError, match="send whole weights once"):
        await fleet.sessions.commit("one")
    assert len(fleet.left()) == MAX_LAYERS
