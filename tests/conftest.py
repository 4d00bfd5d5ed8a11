import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests that start a Ray, and those of one module that has a costly fixture, in one worker.

    Two clusters at once on two cores would only be slow; the engine's tests use one thread each.
    """
    for item in items:
        module = vars(item.module)  # type: ignore[attr-defined]
        if item.get_closest_marker("xdist_group") is not None:
            continue
        if "running_app" in module or "ray" in module:
            item.add_marker(pytest.mark.xdist_group("ray"))
        else:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
