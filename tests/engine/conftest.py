import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny models gain nothing from more threads, and a result must not hang on how many there are."""
    torch.set_num_threads(1)
