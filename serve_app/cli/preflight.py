"""What can be known to fail before anything is started: port, cache folder, device, model folder, memory."""

import errno
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import psutil

from serve_app.cli.failure import CommandFailed
from serve_app.model_store import ModelStoreError, resolve_model

REPLICA_OVERHEAD_BYTES = 2**30
"""Beside its weights a CPU replica holds Python, torch and transformers (0.5 GiB measured) and a first KV cache."""
CGROUP = Path("/sys/fs/cgroup")
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB = 2**30


def check_port(host: str, port: int) -> None:
    """Raise CommandFailed when the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise CommandFailed(
                    f"port {port} on {host} is in use; stop its user or choose another: --port"
                ) from error
            raise CommandFailed(f"port {port} on {host} cannot be bound: {error.strerror}") from error
        except TypeError as error:
            # A name that the encoding of host names has nothing for.
            raise CommandFailed(f"http_options.host is {host!r}, which is no name of a machine; correct it") from error


def check_cache_dir(cache_dir: Path) -> None:
    """Raise CommandFailed when logs, the admin key and the rendered config could not be kept there."""
    if (reason := why_not_writable(cache_dir)) is not None:
        raise cache_failure(cache_dir, reason)


def cache_failure(place: Path, reason: str | None) -> CommandFailed:
    """What ends a command that could not write a folder or file of the cache."""
    return CommandFailed(f"{place} cannot be written: {reason}; name another cache folder with --cache-dir")


def check_weight_folder(setting: str, place: str) -> None:
    """Raise CommandFailed when no weights or versions could be kept there. setting: what names the folder."""
    if not os.path.lexists(place):
        raise CommandFailed(f"{setting} {place} does not exist; make or mount it")
    if (reason := why_not_writable(Path(place))) is not None:
        raise CommandFailed(f"{setting} {place} cannot be written: {reason}; name another folder, or mend this one")


def why_not_writable(folder: Path) -> str | None:
    """Why nothing can be made in this folder, or the folder itself where it is not there; None where all can.

    Tries it: permissions alone say nothing of /proc, of a disk that is full, or of what root may do.
    """
    try:
        existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
        with tempfile.TemporaryDirectory(prefix=".pitstop-", dir=existing):
            return None
    except OSError as error:
        return error.strerror or str(error)


def check_device(device: str, *, num_gpus: float) -> None:
    """Raise CommandFailed when this machine lacks what the replicas are to run on.

    num_gpus: that the least number of replicas reserves, together.
    """
    kind, _, number = device.partition(":")
    if not num_gpus and kind != "cuda":
        return
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus > found:
        raise CommandFailed(
            f"{num_gpus:g} GPU(s) are asked for by replicas.min, and torch sees {found} here; configs/local.yaml serves"
            " on a CPU, else check the driver and CUDA_VISIBLE_DEVICES"
        )
    if kind == "cuda" and not found:
        raise CommandFailed(
            f"device is {device!r}, and torch sees no GPU; say device: cpu, or install a build of torch for this driver"
        )
    if kind == "cuda" and int(number or 0) >= found:
        raise CommandFailed(
            f"device is {device!r}, and torch sees {found} GPU(s), which count from 0; say device: cuda"
        )


def locate_model(model: str, *, cache_dir: Path) -> str:
    """The absolute folder where model is local or the default one, else the hub id unchanged.

    Raises CommandFailed for the default model not yet fetched and for a folder that transformers could not load.
    """
    try:
        resolved = resolve_model(model, cache_dir=cache_dir)
    except ModelStoreError as error:
        raise CommandFailed(str(error)) from error
    try:
        folder = Path(resolved).expanduser()
        if not folder.exists() and _looks_like_hub_id(model):
            return model
        _check_folder(folder)
        return str(folder.absolute())
    except (OSError, RuntimeError) as error:
        # A name that is too long, links in a circle, no permission, and the home of a user who is not there.
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandFailed(f"the model folder {resolved} cannot be read: {reason}; correct `model`") from error


def check_memory(folder: Path, *, replicas: int, ranks: int, dtype: str) -> None:
    """Raise CommandFailed when that many CPU replicas of the model do not fit into the memory that is free now.

    ranks: processes of one replica, which divide its weights.
    """
    needed_bytes = replicas * (weights_bytes(folder, dtype) + ranks * REPLICA_OVERHEAD_BYTES)
    free_bytes = available_bytes()
    if needed_bytes > free_bytes:
        raise CommandFailed(
            f"{replicas} replica(s) of {folder.name} need about {needed_bytes / GIB:.1f} GiB of memory and "
            f"{free_bytes / GIB:.1f} GiB is free; use fewer replicas (--replicas) or a smaller model"
        )


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise CommandFailed(f"the model folder {folder} does not exist")
    if not (folder / "config.json").is_file():
        raise CommandFailed(f"the model folder {folder} holds no config.json")
    _read_model_config(folder)
    if not any(folder.glob("*.safetensors")):
        raise CommandFailed(f"the model folder {folder} holds no *.safetensors")
    for file in folder.glob("*.safetensors"):
        if not file.is_file():
            raise CommandFailed(f"{file} is no file, or a link to one that is gone; put the model's weights there")


def _read_model_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise CommandFailed(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CommandFailed(f"{file} is not JSON ({error}); fetch the model again, or correct the file") from error
    if not isinstance(config, dict):
        raise CommandFailed(
            f"{file} holds a JSON {type(config).__name__}, and a model's config is an object; fetch the model again"
        )
    return config


def _looks_like_hub_id(model: str) -> bool:
    return not model.startswith(("/", ".", "~")) and model.count("/") <= 1


def weights_bytes(folder: Path, dtype: str) -> int:
    """Size once loaded: the files' size, scaled from the dtype they are stored in to the one they are loaded in."""
    stored_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    stored_as = _read_model_config(folder).get("dtype")
    target = "float32" if dtype == "auto" else dtype
    scale = BYTES_PER_VALUE.get(target, 4) / BYTES_PER_VALUE.get(str(stored_as), 4)
    return int(stored_bytes * scale)


def available_bytes() -> int:
    """What the machine has left, cut by this container's limit."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = (CGROUP / "memory.max").read_text().strip(), (CGROUP / "memory.current").read_text()
        return available if limit == "max" else min(available, max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        return available
