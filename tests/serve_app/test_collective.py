"""The process group of a trainer and a receiver: bytes arrive, a lost side is a clear error, no default group."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from engine import InvalidRequest, WeightsSourceError
from serve_app.client.transport import GroupOptions, group_options
from serve_app.weights.collective import (
    RECEIVER,
    TRAINER,
    Meeting,
    PairGroup,
    check_backend,
    open_store,
    pack,
    unpack,
)
from serve_app.weights.tensor_pieces import cut_buckets

HOST = "127.0.0.1"


def pair(*, timeout_s: float = 20.0) -> tuple[PairGroup, PairGroup]:
    """Both sides, met, in this process."""
    store = open_store(Meeting(HOST, 0, "gloo", timeout_s), is_master=True)
    meeting = Meeting(HOST, store.port, "gloo", timeout_s)
    with ThreadPoolExecutor() as pool:
        trainer = pool.submit(PairGroup, meeting, store, TRAINER)
        receiver = pool.submit(PairGroup, meeting, open_store(meeting, is_master=False), RECEIVER)
        return trainer.result(), receiver.result()


def test_buckets_arrive_as_they_were_without_a_default_group() -> None:
    trainer, receiver = pair()
    tensors = {"w": torch.randn(50, 7).to(torch.bfloat16), "empty": torch.empty(0), "v": torch.arange(9)}
    for bucket in cut_buckets(tensors, bucket_bytes=100):
        headers, data = pack(bucket)
        sending = threading.Thread(target=trainer.broadcast, args=(data,))
        sending.start()
        got = unpack(headers, receiver.broadcast(torch.zeros(data.numel(), dtype=torch.uint8)))
        sending.join()
        for piece, expected in zip(got, bucket, strict=True):
            assert piece.data.tobytes() == expected.data.tobytes()
            assert (piece.name, piece.dtype, piece.shape, piece.offset) == (
                expected.name,
                expected.dtype,
                expected.shape,
                expected.offset,
            )
    assert not dist.is_initialized()


def test_a_side_that_is_gone_is_an_error_within_the_timeout() -> None:
    trainer, receiver = pair(timeout_s=1.0)
    trainer.close()
    with pytest.raises(WeightsSourceError, match="gone or did not answer in 1 s"):
        receiver.broadcast(torch.zeros(2**20, dtype=torch.uint8))


def test_nobody_to_meet_is_an_error_within_the_timeout() -> None:
    store = open_store(Meeting(HOST, 0, "gloo", 1.0), is_master=True)
    with pytest.raises(WeightsSourceError, match="gone or did not answer in 1 s"):
        PairGroup(Meeting(HOST, store.port, "gloo", 1.0), store, TRAINER)


@pytest.mark.skipif(torch.cuda.is_available(), reason="refuses where there is no GPU")
def test_nccl_without_a_gpu_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="no CUDA device; use 'gloo'"):
        check_backend("nccl")


def test_what_does_not_go_together_is_refused() -> None:
    assert group_options("object_store", backend=None, timeout_s=30) is None
    assert group_options("torch_distributed", backend=None, timeout_s=30) == GroupOptions("gloo", 30)
    with pytest.raises(InvalidRequest, match="transport is 'carrier pigeon'"):
        group_options("carrier pigeon", backend=None, timeout_s=30)
    with pytest.raises(InvalidRequest, match="belongs to transport 'torch_distributed'"):
        group_options("object_store", backend="gloo", timeout_s=30)
    with pytest.raises(InvalidRequest, match="backend is 'mpi'"):
        group_options("torch_distributed", backend="mpi", timeout_s=30)
    with pytest.raises(InvalidRequest, match="group_timeout_s is 0"):
        group_options("torch_distributed", backend="gloo", timeout_s=0)
