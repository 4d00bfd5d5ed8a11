"""Weights that are exchanged inside the pause are exchanged whole, or the old ones are back to the last bit."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine_runs import DEADLINE_S, greedy, prompt_of, result_of, run_all, running, small_config
from tiny_models import tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from engine import (
    EngineDead,
    InvalidRequest,
    RequestStatus,
    WeightsError,
    WeightsInvalid,
    WeightsLost,
    init_continuous_batching,
)
from engine.live_weights import LiveWeights, StagingRequest
from engine.weights import StagedWeights, bytes_beside, open_source, stage_streamed, stage_weights
from engine.weights.folder import open_folder
from engine.weights.streamed import StreamedWeights, UndoLog

PROMPT = prompt_of(70, seed=4)
SINGLE = "model.safetensors"
NUM_TENSORS = 21


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model(seed=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model(seed=2).save_pretrained(tmp_path / "new")
    return tmp_path / "new"


def state_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def is_same(model: PreTrainedModel, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def streamed(model: PreTrainedModel, folder: Path) -> StreamedWeights:
    return stage_streamed(model, folder, undo_folder=str(folder.parent))


def flip(folder: Path, index: int) -> str:
    """Flips one bit of the tensor that is read as number `index`, and makes the file look as before."""
    file = folder / SINGLE
    with open_source(tiny_model(), folder) as source:
        piece = source.pieces[index]
        name = piece.targets[0]
        place = next(iter(piece.stored.values())).start
    status = file.stat()
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    return name


@contextmanager
def disk_full_at(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "mixtral"])
def test_streamed_weights_are_those_that_staging_gives(family: str, tmp_path: Path) -> None:
    model, other = tiny_model(family, seed=1), tiny_model(family, seed=2)
    other.save_pretrained(tmp_path / "new")
    beside, inside = stage_weights(model, tmp_path / "new"), streamed(model, tmp_path / "new")
    assert inside.is_streamed
    assert not beside.is_streamed
    assert (inside.digests, inside.num_bytes, inside.size_bytes, inside.num_tensors) == (
        beside.digests,
        beside.num_bytes,
        beside.size_bytes,
        beside.num_tensors,
    )
    assert inside.pairs == []
    places = [parameter.data_ptr() for parameter in model.parameters()]
    old = state_of(model)
    inside.commit()
    assert is_same(model, state_of(other))
    inside.rollback()
    assert is_same(model, old)
    inside.commit()
    assert is_same(model, state_of(other))
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    inside.release_old()
    with pytest.raises(WeightsError, match="overwritten"):
        inside.rollback()
    inside.discard()
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]


@pytest.mark.parametrize("index", range(NUM_TENSORS))
def test_a_tensor_that_is_not_what_it_was_brings_the_old_weights_back(
    index: int, model: PreTrainedModel, folder: Path
) -> None:
    old, staged = state_of(model), streamed(model, folder)
    name = flip(folder, index)
    with pytest.raises(WeightsError, match=f"{name} is not what it was"):
        staged.commit()
    assert is_same(model, old)
    flip(folder, index)
    staged.commit()
    assert is_same(model, state_of(tiny_model(seed=2)))
    staged.discard()


@pytest.mark.parametrize("index", range(NUM_TENSORS))
def test_a_disk_that_is_full_at_any_tensor_brings_the_old_weights_back(
    index: int, model: PreTrainedModel, folder: Path
) -> None:
    old, staged = state_of(model), streamed(model, folder)
    with open_source(model, folder) as source:
        written = sum(source.slots[piece.targets[0]].current.nbytes for piece in source.pieces[: index + 1])
    with disk_full_at(written - 1), pytest.raises(OSError, match="too large"):
        staged.commit()
    assert is_same(model, old)
    staged.commit()
    staged.discard()


def test_a_file_that_was_written_to_since_is_refused(model: PreTrainedModel, folder: Path) -> None:
    old, staged = state_of(model), streamed(model, folder)
    tiny_model(seed=3).save_pretrained(folder)
    with pytest.raises(WeightsError, match="changed after they were staged"):
        staged.commit()
    assert is_same(model, old)
    (folder / SINGLE).unlink()
    with pytest.raises(WeightsError, match="holds no"):
        staged.commit()
    assert is_same(model, old)


def test_a_model_that_changed_since_is_refused(model: PreTrainedModel, folder: Path) -> None:
    staged = streamed(model, folder)
    model.double()
    old = state_of(model)
    with pytest.raises(WeightsError, match="moved or changed"):
        staged.commit()
    assert is_same(model, old)


def test_everything_is_checked_before(model: PreTrainedModel, folder: Path) -> None:
    with open_folder(str(folder)) as stored:
        last = max(stored.values(), key=lambda tensor: tensor.start)
    with (folder / SINGLE).open("r+b") as writer:
        writer.seek(last.start)
        writer.write(b"\xff" * 4)
    with pytest.raises(WeightsInvalid, match="not finite"):
        streamed(model, folder)
    with pytest.raises(WeightsError, match="there is no such folder"):
        stage_streamed(model, folder, undo_folder=str(folder / "nowhere"))


def idle_weights(model: PreTrainedModel, free_bytes: int) -> LiveWeights:
    """Weights that nobody generates with, on a device with so much memory to spare."""
    weights = LiveWeights(model, ranks=None, packed=None, in_place=False, free_bytes=lambda: free_bytes)
    weights.loop = init_continuous_batching(model, continuous_batching_config=small_config())._loop
    return weights


# In a manager


@pytest.mark.usefixtures("depth")
def test_a_manager_commits_streamed_weights(model: PreTrainedModel, folder: Path, tmp_path: Path) -> None:
    with running(model) as manager:
        staged = manager.stage_weights(folder, memory="inside", undo_folder=tmp_path)
        assert run_all(manager, [PROMPT], 8) == [greedy(tiny_model(seed=1), PROMPT, 8)]
        manager.commit_weights(staged)
        assert run_all(manager, [PROMPT], 8) == [greedy(tiny_model(seed=2), PROMPT, 8)]
        assert manager.weight_digests() == staged.digests
        assert list(tmp_path.iterdir()) == [folder]


def test_a_commit_that_fails_half_way_leaves_the_old_weights_serving(
    model: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    with running(model) as manager:
        before = manager.weight_digests()
        staged = manager.stage_weights(folder, memory="inside", undo_folder=tmp_path)
        flip(folder, 11)
        with pytest.raises(WeightsError, match="is not what it was"):
            manager.commit_weights(staged)
        assert (manager.weight_version, manager.weight_digests()) == (1, before)
        assert run_all(manager, [PROMPT], 8) == [greedy(tiny_model(seed=1), PROMPT, 8)]


def test_nothing_is_generated_when_the_old_weights_cannot_be_brought_back(
    model: PreTrainedModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = UndoLog.save

    def cut_short(self: UndoLog, tensor: Tensor) -> None:
        """A disk that takes what it then cannot give."""
        save(self, tensor)
        os.ftruncate(self._file.fileno(), 100)

    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    manager.start()
    staged = manager.stage_weights(folder, memory="inside", undo_folder=tmp_path)
    flip(folder, 11)
    monkeypatch.setattr(UndoLog, "save", cut_short)
    with manager.park() as parked:
        request_id = manager.add_request(PROMPT, max_new_tokens=8)
        with pytest.raises(WeightsLost, match="replace the process"):
            parked.commit(staged)
    output = result_of(manager, request_id)
    assert (output.status, list(output.generated_tokens)) == (RequestStatus.FAILED, [])
    manager.join(0.0, timeout=DEADLINE_S)
    with pytest.raises(EngineDead, match="undo log"):
        manager.check_health()
    with pytest.raises(EngineDead, match="replace the process"):
        manager.start()


@pytest.mark.parametrize(
    ("free", "with_folder", "outcome"), [(1 << 40, True, False), (1 << 20, True, True), (1 << 20, False, None)]
)
def test_memory_decides_unless_told(
    free: int, with_folder: bool, outcome: bool | None, model: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    weights = idle_weights(model, free)
    request = StagingRequest(folder, undo_folder=tmp_path if with_folder else None)
    if outcome is None:
        with pytest.raises(WeightsError, match=r"do not fit the 1 MiB that are free.*undo_folder"):
            weights.stage(request)
        return
    staged: StagedWeights = weights.stage(request)
    assert staged.is_streamed is outcome
    assert staged.size_bytes == bytes_beside(model, folder, cast=False, partial=False)
    weights.stage(StagingRequest(folder, memory="beside"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": "outside"}, "must be one of"),
        ({"memory": "inside"}, "needs an undo_folder"),
        ({"memory": "beside", "undo_folder": "."}, "leave it out"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(
    arguments: dict[str, str], message: str, model: PreTrainedModel, folder: Path
) -> None:
    weights = idle_weights(model, 0)
    with pytest.raises(InvalidRequest, match=message):
        weights.stage(StagingRequest(folder, **arguments))
