"""What one choice costs: of a busy fleet, with full reports, as many prefixes as replicas tell, and work under way."""

import time
from typing import Any

import numpy as np

from benchmarks.fleet.simulation import MAX_NAMES
from benchmarks.fleet.traffic import PAGE_SIZE, Scale
from serve_app.routing.fleet_table import FleetTable
from serve_app.routing.replica_choice import ReplicaChoice, RoutingPolicy
from serve_app.routing.score import Work

NUM_CHOICES = 2000
PROMPT_BLOCKS = 8
NUM_PREFIXES = 20_000
"""In all, so that each is at one replica in twenty, and a prompt's blocks are at different ones."""


def measure(num_replicas: int, scale: Scale) -> Any:
    """Gives the microseconds of this thread for each choice."""
    rng = np.random.default_rng(num_replicas)
    table = FleetTable()
    router = ReplicaChoice(table, policy=RoutingPolicy.PREFIX, rng=rng)
    prefixes = rng.integers(0, 2**32, NUM_PREFIXES, dtype=np.uint32)
    for number in range(num_replicas):
        table.report(str(number), _report(rng, prefixes, scale))
    work, now, taken = Work(PROMPT_BLOCKS * PAGE_SIZE, 200), 100.0, []
    for number in range(NUM_CHOICES):
        # One router of eight, at the rate of the chat workload.
        now += 8 / (0.3 * num_replicas)
        if number % 50 == 0:
            table.reported_at[:num_replicas] = now
        names = rng.choice(prefixes, PROMPT_BLOCKS).tolist()
        session = f"s{number % 500}"
        began = time.thread_time()
        rows = router.choose(work, names, now=now, page_size=PAGE_SIZE, session=session)
        taken.append(time.thread_time() - began)
        router.note_sent(int(rows[0]), work, names, now=now, session=session)
        router.note_count(int(rows[0]), 25, now=now)
    return np.array(taken) * 1e6


def _report(rng: np.random.Generator, prefixes: Any, scale: Scale) -> dict[str, Any]:
    return {
        "prefill_tokens": int(rng.integers(5000)),
        "decode_tokens": int(rng.integers(5000)),
        "num_running": int(rng.integers(scale.max_running)),
        "num_waiting": int(rng.integers(3)),
        "max_running": scale.max_running,
        "free_tokens": scale.kv_tokens // 2,
        "total_tokens": scale.kv_tokens,
        "step_s": scale.step_s,
        "request_s": scale.request_s,
        "token_s": scale.token_s,
        "step_tokens": scale.step_tokens,
        "reported_at": 100.0,
        "prefixes": rng.choice(prefixes, MAX_NAMES).tobytes(),
    }
