"""What a router knows of its replicas beyond their reports: what it sent since, and how many requests each told of."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from serve_app.routing.score import Floats, Work

FIRST_SIZE = 256


@dataclass(frozen=True, slots=True)
class Unseen:
    """Sums by replica of what was sent since its report, and when the first of it was; infinity where nothing was."""

    prefill_tokens: Floats
    decode_tokens: Floats
    num_requests: Floats
    since: Floats


@dataclass(frozen=True, slots=True)
class _Entry:
    token: int
    row: int
    sent_at: float
    tokens: tuple[float, float, float]
    """Of prompts, of answers, and the number of requests."""


class Counts:
    """How many requests each replica said it has in all, as it does whenever it accepts one. One thread only."""

    def __init__(self) -> None:
        self._counts = np.zeros(FIRST_SIZE)
        self._counted_at = np.full(FIRST_SIZE, -np.inf)

    def note(self, row: int, num_requests: int, *, now: float) -> None:
        """Takes in a count; at minus infinity it is none."""
        if row >= len(self._counts):
            more = max(row + 1 - len(self._counts), len(self._counts))
            self._counts = np.append(self._counts, np.zeros(more))
            self._counted_at = np.append(self._counted_at, np.full(more, -np.inf))
        self._counts[row], self._counted_at[row] = num_requests, now

    def beyond(self, num_known: Floats, reported_at: Floats) -> Floats | None:
        """Gives by how many a count later than the report is above what is known of: requests that others sent.

        None where there are none at all.
        """
        size = len(num_known)
        if size > len(self._counts):
            self.note(size - 1, 0, now=-np.inf)
        more = (self._counts[:size] - num_known) * (self._counted_at[:size] > reported_at)
        return np.maximum(more, 0.0) if more.max(initial=0.0) > 0 else None


class SentWork:
    """The requests sent lately, by replica. One thread only.

    Those that ended count until the report of their replica is later, unless told of by `done`. Invariant: the sums are
    those over the entries that are kept.
    """

    def __init__(self) -> None:
        self._sums = np.zeros((3, FIRST_SIZE))
        self._since = np.full(FIRST_SIZE, np.inf)
        self._of: dict[int, deque[_Entry]] = {}
        self._entries: dict[int, _Entry] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, row: int, work: Work, *, miss_tokens: float, now: float) -> int:
        """Counts work as sent to the replica in `row`; gives what `done` wants. Never earlier than those before."""
        if row >= len(self._since):
            self._grow(row + 1)
        self._num_added += 1
        entry = _Entry(self._num_added, row, now, (miss_tokens, float(work.decode_tokens), float(work.num_sequences)))
        self._entries[entry.token] = entry
        self._of.setdefault(row, deque()).append(entry)
        self._sums[:, row] += entry.tokens
        self._since[row] = min(now, float(self._since[row]))
        return entry.token

    def done(self, token: int) -> None:
        """The request has ended; nothing where it was forgotten already."""
        entry = self._entries.get(token)
        if entry is not None:
            self._of[entry.row].remove(entry)
            self._drop(entry)

    def unseen(self, reported_at: Floats, *, now: float, horizon_s: float) -> Unseen:
        """Gives the sums of what was sent after each replica's report; forgets what the reports must show by now.

        What is older than horizon_s is forgotten as well. The arrays are good until the next call of anything here.
        """
        size = len(reported_at)
        if size > len(self._since):
            self._grow(size)
        for row, entries in list(self._of.items()):
            shown = max(float(reported_at[row]) if row < size else -np.inf, now - horizon_s)
            while entries and entries[0].sent_at <= shown:
                self._drop(entries.popleft())
        prefill, decode, num = self._sums[:, :size]
        return Unseen(prefill, decode, num, self._since[:size])

    def forget_row(self, row: int) -> None:
        """Drops what was sent to a replica that is gone, whose row another one may take."""
        for entry in self._of.get(row, deque()).copy():
            self.done(entry.token)

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.token]
        entries = self._of[entry.row]
        if entries:
            self._sums[:, entry.row] -= entry.tokens
            self._since[entry.row] = entries[0].sent_at
            return
        # Exactly nothing, whatever was lost in rounding.
        del self._of[entry.row]
        self._sums[:, entry.row] = 0.0
        self._since[entry.row] = np.inf

    def _grow(self, size: int) -> None:
        more = max(size, 2 * len(self._since)) - len(self._since)
        self._sums = np.append(self._sums, np.zeros((3, more)), axis=1)
        self._since = np.append(self._since, np.full(more, np.inf))
