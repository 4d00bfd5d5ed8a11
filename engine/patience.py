"""The waiting of one thread for a pause, which another may end."""

import threading


class Patience:
    """Given to who waits; over once it was ended, be it before the wait begins. Thread-safe, and for one wait."""

    def __init__(self) -> None:
        self._wake: threading.Condition | None = None
        self.is_over = False

    def begin(self, wake: threading.Condition) -> None:
        """Called by who waits, before looking at `is_over`: the condition is notified when that changes."""
        self._wake = wake

    def end(self) -> None:
        """Has who waits give up. A pause that has begun by then goes on."""
        self.is_over = True
        if (wake := self._wake) is not None:
            with wake:
                wake.notify_all()
