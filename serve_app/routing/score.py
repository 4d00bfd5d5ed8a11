"""How long a request would take at each replica: `estimate` and `score`, pure functions over arrays.

A replica computes in steps. A step takes `step_s`, `request_s` more for each request that generates in it, and
`token_s` more for each prompt token, of which it takes what generation leaves of `step_tokens`. All arrays have one
element a replica.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

DECODE_WEIGHT = 0.3
"""Of a second of generating beside one before the first token: who reads along waits for the first."""
MISS_WEIGHT = 1.0
"""Of a second of prompt that another replica has in its cache: all who come after wait for it as well."""


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens to compute: of prompts, and to generate."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_sequences: int = 1


@dataclass(slots=True)
class Replicas:
    """What is known of each replica.

    prefill_tokens, decode_tokens: what it had still to compute age_s ago. sent_prefill_tokens, sent_decode_tokens: what
    was sent there since, the first of it sent_age_s ago. num_running: requests that generate or begin to; num_waiting:
    those without a place. free_tokens: room in the cache of keys and values, of total_tokens in all. is_open: it takes
    requests at all.
    """

    prefill_tokens: Floats
    decode_tokens: Floats
    sent_prefill_tokens: Floats
    sent_decode_tokens: Floats
    num_running: Floats
    num_waiting: Floats
    max_running: Floats
    free_tokens: Floats
    total_tokens: Floats
    step_s: Floats
    request_s: Floats
    token_s: Floats
    step_tokens: Floats
    age_s: Floats
    sent_age_s: Floats
    is_open: Bools

    def __len__(self) -> int:
        return len(self.is_open)

    def check(self) -> None:
        """Asserts that all arrays are as long."""
        assert all(len(getattr(self, field.name)) == len(self) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds from now, at each replica."""

    first_token_s: Floats
    completion_s: Floats
    miss_s: Floats
    """What the part of the prompt takes that the replica has not in its cache."""


def estimate(replicas: Replicas, work: Work, hit_tokens: Floats | float = 0.0) -> Estimate:
    """Gives the times of a request whose first `hit_tokens` each replica has cached; closed ones are not told apart."""
    r = replicas
    batch = np.minimum(r.num_running, r.max_running)
    step_s = r.step_s + r.request_s * batch
    chunk = np.maximum(r.step_tokens - batch, MIN_CHUNK)
    token_s = r.token_s + step_s / chunk
    # What was left is less by now; and what came later cannot have been begun before it came.
    sent_s = r.sent_prefill_tokens * token_s
    all_s = r.prefill_tokens * token_s + sent_s - r.age_s
    queued_s = np.maximum(np.maximum(all_s, sent_s - r.sent_age_s), 0.0)
    decoded = batch * r.age_s / step_s
    left = np.maximum(r.decode_tokens - decoded, 0.0) + np.maximum(r.sent_decode_tokens, r.num_running)
    miss_s = np.maximum(work.prefill_tokens - hit_tokens, 1.0) * token_s
    wait_s = _place_s(r, work, left * step_s / np.maximum(batch, 1.0))
    first_token_s = np.maximum(queued_s, wait_s) + miss_s + step_s
    per_token_s = r.step_s + r.request_s * np.minimum(batch + work.num_sequences, r.max_running)
    decode_s = work.decode_tokens / work.num_sequences * per_token_s
    return Estimate(first_token_s, first_token_s + decode_s, miss_s)


def score(replicas: Replicas, work: Work, hit_tokens: Floats | float = 0.0) -> Floats:
    """Gives the price of the request at each replica, in seconds; infinity where it cannot go."""
    return price(estimate(replicas, work, hit_tokens), replicas.is_open)


def price(times: Estimate, is_open: Bools) -> Floats:
    """Gives what is to be as small as possible, in seconds: infinity where a replica is closed."""
    decode_s = times.completion_s - times.first_token_s
    return np.where(is_open, times.first_token_s + DECODE_WEIGHT * decode_s + MISS_WEIGHT * times.miss_s, np.inf)


def ranked(scores: Floats, rng: np.random.Generator, margin_s: float = 0.0) -> Ints:
    """Gives the replicas with a finite score, best first; those within `margin_s` of each other in random order."""
    noise = rng.random(len(scores))
    order = np.lexsort((noise, scores)) if margin_s == 0 else np.argsort(scores + margin_s * noise)
    return order[: int(np.isfinite(scores).sum())]


MIN_CHUNK = 32.0
"""A step full of generating requests still takes so many prompt tokens, as the engine's scheduler has it."""


def _place_s(r: Replicas, work: Work, left_s: Floats) -> Floats | float:
    """Gives the seconds until there is a place in the batch and room in the cache.

    left_s: seconds of generation left of all requests there, shared by those that run: about the time in which all of
    the present ones end.
    """
    num_there = r.num_running + r.num_waiting
    lacking = num_there + work.num_sequences - r.max_running
    lacking_room = float(work.prefill_tokens + work.decode_tokens) - r.free_tokens
    if max(lacking.max(initial=0.0), lacking_room.max(initial=0.0)) <= 0.0:
        return 0.0
    # No request waits for more places than there are.
    share = np.minimum(lacking, num_there) / np.maximum(num_there, 1.0)
    room_share = lacking_room / np.maximum(r.total_tokens, 1.0)
    return np.maximum(np.maximum(share, room_share), 0.0) * (num_there > 0) * left_s
