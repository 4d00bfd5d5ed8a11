"""How long new weights take from a trainer to every replica, by each way there is, and where the time goes.

    python -m benchmarks.fleet_swap --model ~/.cache/pitstop/smollm2-135m-instruct --replicas 2 --swaps 3

Starts an application of its own. For each way it prints seconds and seconds per GB: sending (from the trainer's memory
to the store), committing beside staging (making the folder durable, for one), staging on all replicas, and the pause;
and what all processes of the fleet read from the disk meanwhile, in megabytes and in times the size of the weights. The
folder is dropped from the page cache before: once is as often as it is read, however many replicas there are.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import ray
import torch
from ray import serve
from safetensors.torch import load_file

from benchmarks.report import machine
from serve_app.app import build_app
from serve_app.client import Pitstop, connect
from serve_app.messages import SwapResult
from serve_app.settings import parse_settings

ENVIRONMENT = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
WAYS = ("folder", "object store", "torch.distributed, gloo", "references")

Swap = Callable[[Pitstop, dict[str, torch.Tensor], str], Awaitable[tuple[float, SwapResult]]]


def main() -> None:
    """Reads the options, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path.home() / ".cache/pitstop/smollm2-135m-instruct")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--swaps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = _measure(options, folder)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def _measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    os.environ.update(ENVIRONMENT)
    replicas = {"min": options.replicas, "max": options.replicas, "graceful_shutdown_timeout_s": 1}
    settings = parse_settings(
        {"model": str(options.model), "replicas": replicas, "weights": {"folder": folder, "history_bytes": 0}}
    )
    ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=2**31)
    try:
        serve.start(proxy_location="Disabled")
        serve.run(build_app(settings), name="pitstop", route_prefix="/")
        return asyncio.run(_swap_by_every_way(options))
    finally:
        serve.shutdown()
        ray.shutdown()


async def _swap_by_every_way(options: argparse.Namespace) -> dict[str, Any]:
    pitstop = connect("pitstop")
    files = sorted(options.model.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    gigabytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) / 1e9
    found: dict[str, Any] = {"machine": machine(), "replicas": options.replicas, "gigabytes": gigabytes}
    for way in WAYS:
        rounds = [await _swap_once(pitstop, way, tensors, options.model) for _ in range(options.swaps)]
        seconds = {name: round(median(one[name] for one in rounds), 4) for name in rounds[0]}
        read = round(seconds["MB_read_from_disk"] / gigabytes / 1e3, 2)
        per_gigabyte = {
            f"{name}_per_GB": round(seconds[name] / gigabytes, 4) for name in ("total_s", "stage_s", "pause_s")
        }
        found[way] = seconds | per_gigabyte | {"times_read_from_disk": read}
        print(way, json.dumps(found[way]), flush=True)
    return found


async def _swap_once(pitstop: Pitstop, way: str, tensors: dict[str, torch.Tensor], model: Path) -> dict[str, float]:
    references = [ray.put({name: tensor}) for name, tensor in tensors.items()] if way == "references" else []
    if way == "folder":
        _drop_from_page_cache(model)
    read_before = _bytes_read()
    started = time.perf_counter()
    sent = started
    if way == "folder":
        result = await pitstop.swap_weights(str(model))
    else:
        transport = "torch_distributed" if "gloo" in way else "object_store"
        async with pitstop.swap(transport=transport) as swap:
            await (swap.put_objects(references) if references else swap.put(tensors))
            sent = time.perf_counter()
        result = swap.result
    ended = time.perf_counter()
    return {
        "total_s": ended - started,
        "send_s": sent - started,
        "seal_s": ended - sent - result.total_s,
        "stage_s": result.staged_s,
        "pause_s": result.paused_s,
        "MB_read_from_disk": (_bytes_read() - read_before) / 1e6,
    }


def _drop_from_page_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # What is not written yet would stay.
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _bytes_read() -> int:
    """Gives what the replicas and the controller have read from the disk, past the page cache."""
    workers = psutil.Process().children(recursive=True)
    return sum(_read_of(worker) for worker in workers)


def _read_of(process: psutil.Process) -> int:
    try:
        return int(process.io_counters().read_bytes)
    except psutil.Error:
        return 0


if __name__ == "__main__":
    main()
