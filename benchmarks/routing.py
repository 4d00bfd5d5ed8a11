"""How long answers take by each routing policy, on a real application with several replicas.

    python -m benchmarks.routing --replicas 3 --seconds 45 --rate 4

Starts an application for each policy, over a small random model made on the spot, and sends it the same requests at the
same times: prompts of families that share a long beginning, more of it than the cache of one replica holds. Prints, by
policy, the time until the first token, the share of prompt tokens that a cache gave, and how evenly the requests went.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

import psutil
import ray
from ray import serve
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import machine
from engine import SamplingParams
from serve_app.app import build_app
from serve_app.client import Pitstop, connect
from serve_app.settings import parse_settings

ENVIRONMENT = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
POLICIES = ("prefix", "work", "power_of_two", "round_robin")
PAGE = 16
NUM_FAMILIES = 12
SHARED_TOKENS, OWN_TOKENS = 768, 32
ANSWERS = (8, 8, 8, 64)
"""Tokens of answers: most are short."""
CACHED_FAMILIES = 5
"""That the cache of one replica holds beside what it computes."""
WARM_UP = 30
"""Requests before the measured ones: replicas learn how long steps take."""


@dataclass
class Seen:
    """What became of the requests of one policy."""

    first_token_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    num_cached: int = 0
    num_prompt: int = 0
    places: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Arrival:
    """One request: when it comes, its prompt and how long its answer is."""

    at_s: float
    prompt: list[int]
    num_tokens: int


def main() -> None:
    """Reads the options, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder)
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
        try:
            serve.start(proxy_location="Disabled")
            found = {policy: measure(model, policy, options) for policy in options.policies}
        finally:
            serve.shutdown()
            ray.shutdown()
    shown = {"machine": machine(), "replicas": options.replicas, "rate": options.rate, "policies": found}
    print(json.dumps(shown, indent=1))
    if options.json:
        options.json.write_text(json.dumps(shown, indent=1) + "\n")


def make_model(folder: str) -> str:
    """Writes a random Llama for which a prompt is work: 12 million parameters."""
    from tests.serve_app.tiny_model import byte_tokenizer

    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def measure(model: str, policy: str, options: argparse.Namespace) -> dict[str, Any]:
    """Starts the application with a policy and sends it all requests."""
    blocks = (SHARED_TOKENS // PAGE) * CACHED_FAMILIES + 8 * (SHARED_TOKENS + OWN_TOKENS + max(ANSWERS)) // PAGE
    settings = parse_settings(
        {
            "model": model,
            "served_model_name": "random",
            "engine": {"page_size": PAGE, "num_blocks": blocks, "max_requests_per_batch": 8},
            "replicas": {
                "min": options.replicas,
                "max": options.replicas,
                "num_cpus": 0.25,
                "torch_threads": 1,
                "graceful_shutdown_timeout_s": 1,
            },
            "routing": {"policy": policy},
        }
    )
    serve.run(build_app(settings), name="pitstop", route_prefix="/")
    try:
        return asyncio.run(_send_all(arrivals(options.seconds, options.rate)))
    finally:
        serve.delete("pitstop")


def arrivals(seconds: float, rate: float) -> list[Arrival]:
    """Gives the same requests at the same times for every policy; popular families have more of them."""
    rng = random.Random(7)
    families = [[rng.randrange(250) for _ in range(SHARED_TOKENS)] for _ in range(NUM_FAMILIES)]
    weights = [1 / (1 + rank) ** 0.5 for rank in range(NUM_FAMILIES)]
    found, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        (family,) = rng.choices(families, weights)
        own = [rng.randrange(250) for _ in range(OWN_TOKENS)]
        found.append(Arrival(at_s, family + own, rng.choice(ANSWERS)))
    return found


async def _send_all(requests: Sequence[Arrival]) -> dict[str, Any]:
    pitstop, seen = connect("pitstop"), Seen()
    rng = random.Random(8)
    for _ in range(WARM_UP):
        await _ask(pitstop, Arrival(0.0, [rng.randrange(250) for _ in range(rng.randrange(8, 256))], 8), Seen())
    begun = time.perf_counter()
    busy_before = sum(psutil.cpu_times()[:3])

    async def send(request: Arrival) -> None:
        await asyncio.sleep(begun + request.at_s - time.perf_counter())
        await _ask(pitstop, request, seen)

    await asyncio.gather(*(send(request) for request in requests))
    seconds = time.perf_counter() - begun
    return {
        "requests": len(requests),
        "first_token_s": _spread(seen.first_token_s),
        "total_s": _spread(seen.total_s),
        "cached_share": round(seen.num_cached / seen.num_prompt, 3),
        "busiest_share": round(max(seen.places.values()) / len(requests), 3),
        "seconds": round(seconds, 1),
        "busy_cores": round((sum(psutil.cpu_times()[:3]) - busy_before) / seconds, 2),
    }


async def _ask(pitstop: Pitstop, request: Arrival, seen: Seen) -> None:
    began, first_s = time.perf_counter(), 0.0
    sampling = SamplingParams(max_new_tokens=request.num_tokens, min_new_tokens=request.num_tokens, temperature=0)
    async for event in pitstop.generate(request.prompt, sampling):
        if not first_s:
            first_s = time.perf_counter() - began
            seen.num_cached += event.num_cached_tokens
            seen.places[event.replica_id] += 1
    seen.first_token_s.append(first_s)
    seen.total_s.append(time.perf_counter() - began)
    seen.num_prompt += len(request.prompt)


def _spread(values: list[float]) -> dict[str, float]:
    cuts = quantiles(values, n=100)
    return {
        "mean": round(mean(values), 3),
        "p50": round(cuts[49], 3),
        "p90": round(cuts[89], 3),
        "p99": round(cuts[98], 3),
    }


if __name__ == "__main__":
    main()
