"""Memory for weights and caches: never that of a tensor which somebody holds, and that of those nobody holds again."""

import gc
import sys

import psutil
import pytest
import torch
from torch import Tensor

from engine import room as rooms
from engine.room import Room, populate


@pytest.fixture(autouse=True)
def small_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "ARENA_BYTES", rooms.PAGE_BYTES)


@pytest.fixture(autouse=True)
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what was taken from the system."""
    sizes: list[int] = []
    new = rooms._new

    def counted(num_bytes: int) -> object:
        sizes.append(num_bytes)
        return new(num_bytes)

    monkeypatch.setattr(rooms, "_new", counted)
    return sizes


def filled(room: Room, value: float) -> list[Tensor]:
    """A set of three megabytes and a half, in two arenas and one of its own."""
    filling = room.filling()
    shapes = [(700, 512), (3,), (1 << 18,), (), (0, 4), (900, 1000)]
    return [filling.empty(shape, torch.float32).fill_(value) for shape in shapes]


def test_tensors_are_as_torch_makes_them(mapped: list[int]) -> None:
    filling = Room().filling()
    for shape, dtype in (((3, 5), torch.bfloat16), ((7,), torch.int64), ((), torch.float32), ((2, 0), torch.float16)):
        tensor = filling.empty(shape, dtype)
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        assert tensor.untyped_storage().nbytes() == tensor.numel() * dtype.itemsize
        assert tensor.data_ptr() % rooms.ALIGNMENT == 0
    assert mapped == [rooms.PAGE_BYTES]


def test_memory_is_taken_again_once_nobody_holds_a_part_of_it(mapped: list[int]) -> None:
    room = Room()
    for value in range(6):
        one = filled(room, value)
        assert all(bool((tensor == value).all()) for tensor in one)
        del one
        gc.collect()
    assert len(mapped) == 3


def test_what_is_held_keeps_its_values(mapped: list[int]) -> None:
    room, held = Room(), []
    for value in range(5):
        held.append((value, filled(room, value)[value]))
        # A view of it is enough, and so is whoever has taken its data over.
        parameter = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        parameter.data = filled(room, 10.0 + value)[0]
        held.append((10 + value, parameter.data[1:]))
        gc.collect()
    assert all(bool((tensor == value).all()) for value, tensor in held)
    before = len(mapped)
    held.clear()
    del parameter
    gc.collect()
    filled(room, 1.0)
    assert len(mapped) == before


def test_a_tensor_outlives_its_room() -> None:
    tensor = filled(Room(), 3.0)[0]
    gc.collect()
    assert bool((tensor == 3.0).all())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give memory at the first touch")
def test_populated_memory_is_there_and_holds_what_it_held() -> None:
    tensor = Room().filling().empty((16 * 2**20,), torch.uint8)
    tensor[:3] = torch.tensor([1, 2, 3])
    before = psutil.Process().memory_info().rss
    populate(tensor[1:])
    assert psutil.Process().memory_info().rss - before > 0.7 * tensor.nbytes
    assert tensor[:3].tolist() == [1, 2, 3]
