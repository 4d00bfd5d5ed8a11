"""How tests share the machine: two clusters of Ray at once on two cores would only be slow."""

import os
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
STARTS_RAY = ("running_app", "import ray\n", "from ray ", "examples/grpo.py", "from serve_app.cli import main; main()")
"""What the text of a module has that starts Ray, or has somebody start it."""

# Ray's workers are nice (15), and beside other work of the machine a replica then takes minutes to start.
os.environ.setdefault("RAY_worker_niceness", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests that start Ray first: they take longest, and one worker has them all."""
    items.sort(key=lambda item: not starts_ray(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    config.option.loadscopereorder = False
    return _ByModule(config, log)


class _ByModule(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """A module goes to one worker, and all that start Ray to the same one.

    xdist's own groups need a name of pytest's that is no more.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if starts_ray(nodeid) else nodeid.partition("::")[0]


def starts_ray(nodeid: str) -> bool:
    return _text_has_any(nodeid.partition("::")[0])


@cache
def _text_has_any(path: str) -> bool:
    text = (ROOT / path).read_text()
    return any(part in text for part in STARTS_RAY)
