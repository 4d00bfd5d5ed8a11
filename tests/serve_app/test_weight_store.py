"""The store: folders that are whole or not there, bounded, and free of what killed writers left."""

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine import InvalidRequest, WeightsError, WeightsInvalid, WeightsSourceError
from serve_app.weights import safetensors_writer
from serve_app.weights.store import FolderWriter, WeightStore
from serve_app.weights.tensor_pieces import TensorPiece, cut_buckets

DEAD = "20260101T000000Z-00000000"


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store", history_bytes=2**40)


def send(writer: FolderWriter, tensors: dict[str, Tensor], *, bucket_bytes: int = 2**20) -> None:
    for bucket in cut_buckets(tensors, bucket_bytes=bucket_bytes):
        writer.append(bucket)


def sealed(store: WeightStore, num_bytes: int) -> str:
    writer = store.begin()
    send(writer, {"w": torch.zeros(num_bytes, dtype=torch.uint8)})
    return writer.seal()


def read(folder: str) -> dict[str, Tensor]:
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_nothing_left(store: WeightStore) -> None:
    assert list(store.folder.iterdir()) == []


def odd_tensors() -> dict[str, Tensor]:
    shared = torch.randn(6, 4)
    return {
        "bfloat16": torch.randn(33, 7).to(torch.bfloat16),
        "half": torch.randn(5).half(),
        "float8": torch.randn(8).to(torch.float8_e4m3fn),
        "shared": shared,
        "shared too": shared,
        "transposed": shared.T,
        "a part": shared[1:3, ::2],
        "grad": torch.nn.Parameter(torch.randn(3)),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "ids": torch.arange(10),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        'a name, "quoted" and 日本': torch.ones(2),
    }


@pytest.mark.parametrize("bucket_bytes", [1, 7, 64, 2**20])
def test_whatever_is_sent_comes_back_bit_by_bit(store: WeightStore, bucket_bytes: int) -> None:
    tensors = odd_tensors()
    writer = store.begin()
    send(writer, tensors, bucket_bytes=bucket_bytes)
    back = read(writer.seal())
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        same = (
            back[name]
            .reshape(-1)
            .view(torch.uint8)
            .equal(tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8))
        )
        assert same, name


def test_no_bucket_is_longer_than_asked() -> None:
    buckets = list(cut_buckets({"a": torch.zeros(100), "b": torch.zeros(3)}, bucket_bytes=64))
    assert [sum(piece.data.size for piece in bucket) for bucket in buckets] == [64] * 6 + [28]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse(), "no tensor"],
    ids=["meta", "complex", "sparse", "text"],
)
def test_a_tensor_without_bytes_is_refused_by_name(tensor: Tensor) -> None:
    with pytest.raises(InvalidRequest, match=r"some\.weight"):
        list(cut_buckets({"some.weight": tensor}, bucket_bytes=64))


def test_many_tensors_go_over_several_files_with_an_index(store: WeightStore) -> None:
    tensors = {f"layer.{number}.weight": torch.full((2,), float(number)) for number in range(1500)}
    writer = store.begin()
    send(writer, tensors)
    folder = writer.seal()
    assert len(list(Path(folder).glob("*.safetensors"))) > 1
    assert (Path(folder) / "model.safetensors.index.json").exists()
    back = read(folder)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_large_tensors_begin_new_files(tmp_path: Path) -> None:
    writer = safetensors_writer.SafetensorsWriter(tmp_path, shard_bytes=100)
    tensors = {name: torch.zeros(60, dtype=torch.uint8) for name in "abc"} | {"d": torch.ones(300)}
    for bucket in cut_buckets(tensors, bucket_bytes=50):
        for piece in bucket:
            writer.append(piece)
    assert len(set(writer.finish().values())) == 4
    back = read(str(tmp_path))
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_the_same_tensor_may_come_twice_and_another_one_not(store: WeightStore) -> None:
    writer = store.begin()
    once = {"w": torch.arange(100.0), "v": torch.ones(3)}
    send(writer, once)
    send(writer, once, bucket_bytes=33)
    assert writer.size_bytes == 412
    with pytest.raises(WeightsInvalid, match="w was sent twice") as caught:
        send(writer, {"w": torch.arange(100.0).flip(0)}, bucket_bytes=33)
    assert caught.value.tensor == "w"
    assert_nothing_left(store)


@pytest.mark.parametrize("other", [torch.zeros(100, dtype=torch.float64), torch.zeros(10, 10)])
def test_one_name_with_two_shapes_or_types_is_refused(store: WeightStore, other: Tensor) -> None:
    writer = store.begin()
    send(writer, {"w": torch.zeros(100)})
    with pytest.raises(WeightsInvalid, match="w was sent twice"):
        send(writer, {"w": other})


def pieces_of_one(numbers: list[int]) -> list[TensorPiece]:
    all_of_it = [piece for bucket in cut_buckets({"w": torch.ones(4)}, bucket_bytes=4) for piece in bucket]
    return [all_of_it[number] for number in numbers]


@pytest.mark.parametrize("numbers", [[1], [0, 2], [0, 1, 2]], ids=["no begin", "a gap", "no end"])
def test_a_tensor_that_is_not_whole_is_refused(store: WeightStore, numbers: list[int]) -> None:
    writer = store.begin()

    def write() -> None:
        writer.append(pieces_of_one(numbers))
        writer.seal()

    with pytest.raises(InvalidRequest, match="w"):
        write()
    assert_nothing_left(store)


def test_another_tensor_may_not_come_between_two_pieces(store: WeightStore) -> None:
    writer = store.begin()
    writer.append(pieces_of_one([0, 1]))
    with pytest.raises(InvalidRequest, match="w has 16 bytes and only 8 were sent"):
        send(writer, {"v": torch.ones(1)})


def test_nothing_sent_is_refused(store: WeightStore) -> None:
    with pytest.raises(InvalidRequest, match="no tensor"):
        store.begin().seal()
    assert_nothing_left(store)


@contextmanager
def files_at_most(num_bytes: int) -> Iterator[None]:
    """Writes beyond this fail, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(store: WeightStore) -> None:
    writer = store.begin()
    with files_at_most(2**20), pytest.raises(WeightsError, match=r"cannot be written to .*store.*history_bytes"):
        send(writer, {"w": torch.zeros(2**20)})
    assert_nothing_left(store)


def test_a_store_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be written"):
        WeightStore(tmp_path / "no" / "store", history_bytes=1).begin()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_temporary_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    os.chown(tmp_path / "store", 12345, -1)
    with pytest.raises(WeightsError, match="belongs to another user"):
        WeightStore(tmp_path / "store", history_bytes=1, is_temporary=True).begin()


def test_what_is_not_sealed_is_not_listed_and_a_dropped_folder_is_gone(store: WeightStore) -> None:
    writer = store.begin()
    send(writer, {"w": torch.zeros(8)})
    assert store.sealed() == []
    folder = writer.seal()
    assert [str(path) for path in store.sealed()] == [folder]
    writer.drop()
    assert_nothing_left(store)


def test_only_what_dead_writers_left_is_removed(store: WeightStore) -> None:
    kept = sealed(store, 10)
    alive = store.begin()
    (partial,), (lock,) = store.folder.glob("*.partial"), store.folder.glob("*.lock")
    # The lock of a killed process is free, as is that of a copy.
    shutil.copytree(partial, store.folder / f"{DEAD}.partial")
    shutil.copy(lock, store.folder / f"{DEAD}.lock")
    shutil.copytree(partial, store.folder / "20260101T000000Z-00000001.partial")
    WeightStore(store.folder, history_bytes=1)
    assert {str(path) for path in store.folder.iterdir()} == {kept, str(partial), str(lock)}
    send(alive, {"w": torch.zeros(8)})
    alive.seal()
    assert len(store.sealed()) == 2


def test_what_did_not_come_is_filled_from_the_last_folder_that_has_it(store: WeightStore) -> None:
    def layer(**tensors: Tensor) -> str:
        writer = store.begin()
        send(writer, tensors)
        return writer.seal()

    large = torch.randn(2**22 + 3)  # more than one piece is read at once
    below = layer(a=torch.zeros(2), b=torch.zeros(3).half(), large=large, empty=torch.empty(0))
    above = layer(a=torch.ones(2))
    writer = store.begin()
    send(writer, {"b": torch.ones(3).half()})
    assert writer.fill([below, above]) == ["a", "empty", "large"]
    whole = read(writer.seal())
    assert torch.equal(whole["a"], torch.ones(2))
    assert torch.equal(whole["b"], torch.ones(3).half())
    assert torch.equal(whole["large"], large)
    assert whole["empty"].shape == (0,)


def test_many_small_tensors_are_filled_from_sharded_folders(store: WeightStore) -> None:
    tensors = {f"layer.{number}.weight": torch.full((2,), float(number)) for number in range(1500)}
    below = store.begin()
    send(below, tensors)
    writer = store.begin()
    assert len(writer.fill([below.seal()])) == 1500
    back = read(writer.seal())
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("damage", ["gone", "cut short", "no safetensors"])
def test_a_folder_that_cannot_be_read_is_a_clear_error(store: WeightStore, damage: str) -> None:
    below = Path(sealed(store, 100)) / "model.safetensors"
    if damage == "gone":
        below.unlink()
    else:
        below.write_bytes(below.read_bytes()[:-1] if damage == "cut short" else b"\xff" * 100)
    writer = store.begin()
    with pytest.raises(WeightsSourceError, match=r"cannot be read any more.*send whole weights"):
        writer.fill([str(below.parent)])
    writer.drop()
    assert store.sealed() == [below.parent]


def test_what_is_not_the_stores_is_left_alone(tmp_path: Path) -> None:
    mine = {"checkpoints", "notes.partial", "some.lock", "some.new-lock"}
    for name in mine:
        (tmp_path / name).mkdir()
    store = WeightStore(tmp_path, history_bytes=0)
    folder = sealed(store, 10)
    assert store.sealed() == [Path(folder)]
    assert store.prune([]) == [Path(folder)]
    assert {path.name for path in tmp_path.iterdir()} == mine


def test_pruning_takes_what_no_version_needs_and_then_the_oldest(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, history_bytes=400_000)
    # Each folder has 128 KiB for its header and a little more.
    orphan, first, second, third, swapping = (sealed(store, 1000) for _ in range(5))
    outside = str(tmp_path.parent / "a folder of the user's")
    versions = [[outside], [first], [second], [third]]
    assert set(store.prune(versions, in_use=[swapping])) == {Path(orphan), Path(first)}
    assert store.prune(versions[1:], in_use=[swapping]) == []
    assert {str(path) for path in store.sealed()} == {second, third, swapping}
    assert store.size_bytes() <= 400_000


def test_a_base_layer_of_a_kept_version_stays_and_so_does_the_committed_one(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, history_bytes=1)
    base, between, layer = (sealed(store, 1000) for _ in range(3))
    assert store.prune([[base], [between], [base, layer]]) == [Path(between)]
    assert {str(path) for path in store.sealed()} == {base, layer}
