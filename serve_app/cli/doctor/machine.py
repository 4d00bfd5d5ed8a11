"""The machine: devices, memory that processes share, disks, files, and the folders that caches need."""

import os
import resource
import shutil
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from serve_app.cli.doctor.finding import Findings, error, good, warning
from serve_app.cli.preflight import GIB, available_bytes, why_not_writable
from serve_app.settings import available_cores

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = GIB
"""For Ray's object store; containers have 64 MiB where nobody asks for more."""
LEAST_DISK_BYTES = 2 * GIB
"""For Ray's logs and what it spills; it refuses work on a disk that is 95 % full."""
LEAST_FILES = 4096
"""Each stream is a socket at the proxy and another to the client."""
TOKEN_FILE = Path(".ray") / "auth_token"


def check_cores_and_memory() -> Findings:
    """Gives how many cores and how much memory are there for this process."""
    yield good("machine", f"{available_cores()} cores, {available_bytes() / GIB:.1f} GiB of memory free")


def check_gpu() -> Findings:
    """Gives what torch sees of GPUs, and whether flash-attn is there for them."""
    import torch

    if not torch.cuda.is_available():
        yield good("gpu", "none that torch sees; the CPU serves")
        return
    count = torch.cuda.device_count()
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield good("gpu", f"{index}: {name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free")
    if find_spec("flash_attn") is None:
        yield warning(
            "flash-attn",
            "not installed",
            why="attention goes through torch's own kernels, without CUDA graphs: slower",
            remedy='pip install --no-build-isolation "pitstop[gpu]" (compiles it)',
        )
    else:
        yield good("flash-attn", "installed")


def check_shared_memory(folder: Path = SHARED_MEMORY) -> Findings:
    """Gives whether Ray's object store has room."""
    if not folder.is_dir():
        return
    size = shutil.disk_usage(folder).free
    if size >= LEAST_SHARED_BYTES:
        yield good("shared memory", f"{size / GIB:.1f} GiB free in {folder}")
    else:
        yield warning(
            "shared memory",
            f"{size / GIB:.2f} GiB free in {folder}",
            why="Ray's object store falls back to the disk, which slows swaps by tensors",
            remedy="docker run --shm-size 2g, or on Kubernetes an emptyDir of medium Memory there",
        )


def check_disk(folder: Path | None = None) -> Findings:
    """Gives whether Ray has room for logs and sessions."""
    folder = folder or Path(tempfile.gettempdir())
    usage = shutil.disk_usage(folder)
    if not os.access(folder, os.W_OK):
        yield error(
            "disk", f"{folder} cannot be written", why="Ray keeps its sockets and logs there", remedy="set TMPDIR"
        )
    elif usage.free < LEAST_DISK_BYTES or usage.free < usage.total / 20:
        yield warning(
            "disk",
            f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {folder}",
            why="Ray refuses work on a disk that is 95 % full",
            remedy=f"make room in {folder}, or set TMPDIR to another disk",
        )
    else:
        yield good("disk", f"{usage.free / GIB:.1f} GiB free in {folder}")


def check_cache_folder(cache_dir: Path) -> Findings:
    """Gives whether `pitstop serve` can keep its logs, its admin key and the default model."""
    reason = why_not_writable(cache_dir)
    if reason is None:
        yield good("cache folder", f"{cache_dir} can be written")
    else:
        yield error(
            "cache folder",
            f"{cache_dir} cannot be written: {reason}",
            why="pitstop serve keeps its logs and the admin key there",
            remedy="name another with --cache-dir",
        )


def check_open_files() -> Findings:
    """Gives whether many streams can be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= LEAST_FILES:
        yield good("open files", "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft}")
    else:
        limit = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
        yield warning(
            "open files",
            f"up to {soft} in a process",
            why="each stream takes a socket, so connections are refused from some hundreds on",
            remedy=f"ulimit -n {LEAST_FILES} (the most that may be set here: {limit})",
        )


def check_numba_cache(environment: Mapping[str, str], *, engine: Path | None = None) -> Findings:
    """Gives whether the attention of CPU replicas is compiled once, or at every start. engine: where its code lies."""
    if engine is None:
        import engine as package

        engine = Path(package.__file__).parent
    named = environment.get("NUMBA_CACHE_DIR")
    # Numba's own order.
    places = [Path(named)] if named else [engine / "__pycache__", Path.home() / ".cache" / "numba"]
    writable = next((place for place in places if why_not_writable(place) is None), None)
    if writable is not None:
        yield good("compiled code", f"is kept in {writable}")
    else:
        yield warning(
            "compiled code",
            f"cannot be kept: {' and '.join(map(str, places))} cannot be written",
            why="every CPU replica compiles its attention anew at its start, before its first token",
            remedy="set NUMBA_CACHE_DIR to a folder that can be written",
        )


def check_ray(environment: Mapping[str, str], *, home: Path | None = None) -> Findings:
    """Gives what is to be said of Ray's addresses and of who may run code through its ports."""
    home = home or Path.home()
    if address := environment.get("RAY_ADDRESS"):
        yield warning(
            "ray",
            f"RAY_ADDRESS is {address!r}",
            why="clients and `serve run` go to that cluster, while `pitstop serve` starts one of its own",
            remedy="unset RAY_ADDRESS to serve here; to serve there: serve run",
        )
    if environment.get("RAY_AUTH_MODE") == "disabled":
        yield warning(
            "ray",
            "RAY_AUTH_MODE is 'disabled'",
            why="whoever reaches Ray's ports runs code",
            remedy="unset it, or keep every port of Ray from others",
        )
        return
    places = [environment.get("RAY_AUTH_TOKEN_PATH"), str(home / TOKEN_FILE)]
    has_token = "RAY_AUTH_TOKEN" in environment or any(place and Path(place).is_file() for place in places)
    if has_token:
        yield good("ray", "a token keeps its ports")
    elif why_not_writable(home / TOKEN_FILE.parent) is None:
        yield good("ray", f"makes a token for its ports in {home / TOKEN_FILE}")
    else:
        yield error(
            "ray",
            f"there is no token, and {home / TOKEN_FILE} cannot be written",
            why="Ray does not start without one",
            remedy="set RAY_AUTH_TOKEN_PATH, or HOME to a folder that can be written",
        )
