"""Who runs a model: one manager at a time, since a step changes the modules for as long as it takes."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import nn

from engine.errors import InvalidRequest

END_S = 5.0
"""How long to wait for the last step of a manager that was stopped or dropped."""


class Owner(Protocol):
    """What has to be known of a manager."""

    @property
    def is_stopping(self) -> bool: ...

    @property
    def lends_to_this_thread(self) -> bool: ...


class Ownership:
    """Of one model. Thread-safe."""

    def __init__(self) -> None:
        self.turn = threading.RLock()
        """Held for the length of a call that makes a manager, uses it and ends it, so that such calls come in turn."""
        self._lock = threading.RLock()
        self._running: list[tuple[weakref.ref[Owner], threading.Thread]] = []

    @contextmanager
    def claim(self, owner: Owner) -> Iterator[None]:
        """Inside, nobody else begins to run the model. Raises InvalidRequest while another manager runs it.

        Who holds that manager's pause may run another one, and has to end it before the pause.
        """
        with self._lock:
            if self._is_run_by_another(owner):
                gc.collect()  # one that nobody holds may be waiting for it, and ends then
            if self._is_run_by_another(owner):
                raise InvalidRequest(
                    "another manager runs this model already; stop() that one first, or generate with it"
                )
            yield

    def mark_running(self, owner: Owner, thread: threading.Thread) -> None:
        """Keeps others out until the thread has ended; called inside `claim`, once it has started."""
        self._running.append((weakref.ref(owner), thread))

    def _is_run_by_another(self, owner: Owner) -> bool:
        self._running = [(other, thread) for other, thread in self._running if thread.is_alive()]
        return any(_is_busy(other(), thread) for other, thread in self._running if other() is not owner)


def ownership_of(model: nn.Module) -> Ownership:
    """Gives the one of this model."""
    with _LOCK:
        return _OWNERSHIPS.setdefault(model, Ownership())


_LOCK = threading.Lock()
_OWNERSHIPS: weakref.WeakKeyDictionary[nn.Module, Ownership] = weakref.WeakKeyDictionary()


def _is_busy(owner: Owner | None, thread: threading.Thread) -> bool:
    if owner is None or owner.is_stopping:
        thread.join(END_S)
    elif owner.lends_to_this_thread:
        return False
    return thread.is_alive()
