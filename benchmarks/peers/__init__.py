"""Who is measured: a module for each contestant, with its settings and how it generates.

Peers need an environment of their own: they also say what is installed there and how they take the model.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers import llamacpp, openvino, ours, static, transformers, vllm

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, number of new tokens) -> the new ids of each, all prompts submitted at once."""


class Contestant(Protocol):
    """`load` runs in a process of its own, with the job of a workload.

    SETTINGS: of these it counts with its best, for each size of the workload.
    NOTE: what a reader has to know to compare.
    """

    __file__: str
    TITLE: str
    SETTINGS: tuple[dict[str, Any], ...]
    NOTE: str

    def load(self, job: dict[str, Any]) -> Generate: ...


class Peer(Contestant, Protocol):
    """Its module is run by another Python, so that it imports nothing of this repository.

    REQUIREMENTS: what pip installs. REMOVED: what of their dependencies is taken out again.
    environment: variables that must be set before its process starts; `folder` is its environment.
    prepare: writes its form of the model to `target`; runs in its environment, once a model.
    """

    REQUIREMENTS: tuple[str, ...]
    REMOVED: tuple[str, ...]

    def environment(self, job: dict[str, Any], folder: Path) -> dict[str, str]: ...

    def prepare(self, model: str, target: str) -> None: ...


BASELINE: Any = transformers
ALWAYS: tuple[Any, ...] = (ours, transformers, static)
PEERS: dict[str, Any] = {"vllm": vllm, "openvino": openvino, "llamacpp": llamacpp}
"""By the name on the command line. `Any`: a module is not seen as its protocol."""
