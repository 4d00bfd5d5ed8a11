"""What a router knows of its replicas beyond their reports: what it sent since, and how many requests each told of."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serve_app.routing_score import Floats, Work

FIRST_SIZE = 256


@dataclass(frozen=True, slots=True)
class Unseen:
    """Sums by replica of what was sent since its report, and when the first of it was; infinity where nothing was."""

    prefill_tokens: Floats
    decode_tokens: Floats
    num_requests: Floats
    since: Floats


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

    def beyond(self, num_known: Floats, reported_at: Floats) -> Floats:
        """Gives by how many a count later than the report is above what is known of: requests that others sent."""
        others = np.zeros(len(num_known))
        size = min(len(others), len(self._counts))
        is_later = self._counted_at[:size] > reported_at[:size]
        others[:size] = np.where(is_later, np.maximum(self._counts[:size] - num_known[:size], 0.0), 0.0)
        return others


class SentWork:
    """A ring of the requests sent lately. One thread only.

    Those that ended count until they are as old as the oldest report, unless told of by `done`.
    """

    def __init__(self) -> None:
        self._sent_at = np.full(FIRST_SIZE, -np.inf)
        self._rows = np.zeros(FIRST_SIZE, dtype=np.int64)
        self._prefill = np.zeros(FIRST_SIZE)
        self._decode = np.zeros(FIRST_SIZE)
        self._num_sequences = np.zeros(FIRST_SIZE)
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def add(self, row: int, work: Work, *, miss_tokens: float, now: float) -> int:
        """Counts work as sent to the replica in `row`; gives what `done` wants. Never earlier than those before."""
        if len(self) == len(self._sent_at):
            self._grow()
        place = self._end % len(self._sent_at)
        self._sent_at[place] = now
        self._rows[place] = row
        self._prefill[place] = miss_tokens
        self._decode[place] = work.decode_tokens
        self._num_sequences[place] = work.num_sequences
        self._end += 1
        return self._end - 1

    def done(self, token: int) -> None:
        """The request has ended; nothing where it was forgotten already."""
        if self._start <= token < self._end:
            self._sent_at[token % len(self._sent_at)] = -np.inf

    def unseen(self, reported_at: Floats, *, horizon_s: float) -> Unseen:
        """Gives the sums of what was sent after each replica's report; forgets what all reports must show."""
        size = len(reported_at)
        oldest = float(reported_at.min(initial=np.inf))
        newest = float(reported_at.max(initial=-np.inf))
        self._forget(max(oldest, newest - horizon_s))
        places = np.arange(self._start, self._end) % len(self._sent_at)
        rows = self._rows[places]
        is_unseen = (rows < size) & (self._sent_at[places] > reported_at[np.minimum(rows, size - 1)])
        rows, places = rows[is_unseen], places[is_unseen]
        since = np.full(size, np.inf)
        # Of several values for one place the last is kept, which backwards is the oldest.
        since[rows[::-1]] = self._sent_at[places[::-1]]
        columns = (self._prefill, self._decode, self._num_sequences)
        prefill, decode, num = (np.bincount(rows, column[places], size).astype(np.float64) for column in columns)
        return Unseen(prefill, decode, num, since)

    def forget_row(self, row: int) -> None:
        """Drops what was sent to a replica that is gone, whose row another one may take."""
        self._sent_at[self._rows == row] = -np.inf

    def _forget(self, before: float) -> None:
        while self._start < self._end and self._sent_at[self._start % len(self._sent_at)] <= before:
            self._start += 1

    def _grow(self) -> None:
        """Doubles the ring; places follow the numbers of entries, so that tokens stay true."""
        old, size = len(self._sent_at), 2 * len(self._sent_at)
        numbers = np.arange(self._start, self._end)
        for name in ("_sent_at", "_rows", "_prefill", "_decode", "_num_sequences"):
            before: npt.NDArray[np.generic] = getattr(self, name)
            grown = np.zeros(size, dtype=before.dtype)
            grown[numbers % size] = before[numbers % old]
            setattr(self, name, grown)
