from pathlib import Path

import engine_runs
import pytest
import torch

LONG_AT_DEPTH_2 = {"test_equality.py", "test_differential.py", "test_processors.py"}
"""Their many cases with two steps in flight are for `make test-all`; the others' are in `make test`."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny models gain nothing from more threads, and a result must not hang on how many there are."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "depth 2" in item.name and Path(item.path).name in LONG_AT_DEPTH_2:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs a test with one step in flight, and again with two."""
    depth: int = request.param
    monkeypatch.setitem(engine_runs.DEFAULTS, "use_async_batching", depth == 2)
    return depth
