"""What can be known to fail before anything is started: port, model folder, memory."""

import errno
import json
import socket
from pathlib import Path

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


def locate_model(model: str, *, cache_dir: Path) -> str:
    """The absolute folder where model is local or the default one, else the hub id unchanged.

    Raises CommandFailed for the default model not yet fetched and for a folder that transformers could not load.
    """
    try:
        resolved = resolve_model(model, cache_dir=cache_dir)
    except ModelStoreError as error:
        raise CommandFailed(str(error)) from error
    folder = Path(resolved).expanduser()
    if not folder.exists() and _looks_like_hub_id(model):
        return model
    if not folder.is_dir():
        raise CommandFailed(f"the model folder {folder} does not exist")
    if not (folder / "config.json").is_file():
        raise CommandFailed(f"the model folder {folder} holds no config.json")
    if not any(folder.glob("*.safetensors")):
        raise CommandFailed(f"the model folder {folder} holds no *.safetensors")
    return str(folder.absolute())


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


def _looks_like_hub_id(model: str) -> bool:
    return not model.startswith(("/", ".", "~")) and model.count("/") <= 1


def weights_bytes(folder: Path, dtype: str) -> int:
    """Size once loaded: the files' size, scaled from the dtype they are stored in to the one they are loaded in."""
    stored_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    stored_as = json.loads((folder / "config.json").read_text()).get("dtype")
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
