"""How much of the host's memory this process may still take, within the limits of its control groups."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """Where one version of control groups keeps its numbers, in bytes."""

    mount: str
    limit: str
    used: str
    reclaimable: str
    """The line of memory.stat that counts file pages which go when memory is short."""


_V1 = _Hierarchy("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Hierarchy("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def free_host_bytes(root: Path = Path("/")) -> int:
    """Gives what can be had without swapping, and without going beyond a control group; `root` is for tests."""
    rooms = [limit - used for limit, used in _limits(root)]
    return max(0, min([psutil.virtual_memory().available, *rooms]))


def total_host_bytes(root: Path = Path("/")) -> int:
    """Gives the memory of the machine, or the smallest limit of a control group."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits(root))])


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of every control group of this process that has a limit, its parents included."""
    for hierarchy, group in _groups(root):
        mount = root / hierarchy.mount
        folder = mount / group.strip("/")
        # Inside a container the path is often that of the host, and the container's own group is the mount.
        for place in (folder, *folder.parents) if folder.is_dir() else (mount,):
            limit, used = _number(place / hierarchy.limit), _number(place / hierarchy.used)
            if limit is not None and used is not None:
                yield limit, used - _reclaimable(place, hierarchy)
            if place == mount:
                break


def _groups(root: Path) -> Iterator[tuple[_Hierarchy, str]]:
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _V1, group
        elif not controllers:
            yield _V2, group


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or no limit ("max")."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None


def _reclaimable(place: Path, hierarchy: _Hierarchy) -> int:
    stat = place / "memory.stat"
    lines = stat.read_text().splitlines() if stat.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.split()[0] == hierarchy.reclaimable)
