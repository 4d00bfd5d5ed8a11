import engine_runs
import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny models gain nothing from more threads, and a result must not hang on how many there are."""
    torch.set_num_threads(1)


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs a test with one step in flight, and again with two."""
    depth: int = request.param
    monkeypatch.setitem(engine_runs.DEFAULTS, "use_async_batching", depth == 2)
    return depth
