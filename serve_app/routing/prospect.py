"""What a request may expect of the fleet at this moment: `prospect`, a pure function over what is known of replicas."""

from dataclasses import dataclass, replace

import numpy as np

from serve_app.routing.score import Floats, Replicas, Work, estimate, score

WINDOW_STEPS = 4
"""Prompt tokens that a replica is given ahead, in steps: it never runs dry between two messages, and what waits longer
waits where it can be overtaken."""
LEAST_ROOM, MOST_ROOM = 4.0, 256.0
"""Requests that a replica is given ahead of their first tokens: its free places, within these."""

LEAST_TOKEN_S = 1e-6
"""No fleet needs less for a token."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a request may expect.

    first_token_s, decode_s: at the best replica, from now, and from there on. alone_s: until the first token if nobody
    else were there. token_s: what the fleet needs for a token of the usual mix of prompts and answers. num_replicas:
    that are open. room_tokens, room_requests: what all of them together take ahead of first tokens.
    """

    first_token_s: float
    decode_s: float
    alone_s: float
    token_s: float
    num_replicas: int
    room_tokens: float
    room_requests: float


def prospect(replicas: Replicas, work: Work, hits: Floats, *, mean_work: tuple[float, float]) -> Prospect | None:
    """Gives what `work` may expect; None where no replica is open. mean_work: tokens of a usual prompt and answer."""
    is_open = replicas.is_open
    num_open = int(is_open.sum())
    if num_open == 0:
        return None
    best = int(np.argmin(score(replicas, work, hits)))
    times, alone = estimate(replicas, work, hits), estimate(_emptied(replicas), work, hits)
    free_places = replicas.max_running - replicas.num_running
    batch = np.clip(replicas.num_running, 1.0, replicas.max_running)
    prompt_s = replicas.token_s + replicas.step_s / np.maximum(replicas.step_tokens, 1.0)
    answer_s = replicas.step_s / batch + replicas.request_s
    prefill, decode = mean_work if sum(mean_work) else (work.prefill_tokens, work.decode_tokens)
    usual_s = np.maximum((prefill * prompt_s + decode * answer_s) / max(prefill + decode, 1), LEAST_TOKEN_S)
    return Prospect(
        first_token_s=float(times.first_token_s[best]),
        decode_s=float(times.completion_s[best] - times.first_token_s[best]),
        alone_s=float(alone.first_token_s[is_open].min()),
        token_s=float(1.0 / np.sum(1.0 / usual_s[is_open])),
        num_replicas=num_open,
        room_tokens=float(WINDOW_STEPS * replicas.step_tokens[is_open].sum()),
        room_requests=float(np.clip(free_places, LEAST_ROOM, MOST_ROOM)[is_open].sum()),
    )


def _emptied(replicas: Replicas) -> Replicas:
    nothing = np.zeros(len(replicas))
    return replace(
        replicas,
        prefill_tokens=nothing,
        decode_tokens=nothing,
        sent_prefill_tokens=nothing,
        sent_decode_tokens=nothing,
        num_running=nothing,
        num_waiting=nothing,
        free_tokens=replicas.total_tokens,
    )
