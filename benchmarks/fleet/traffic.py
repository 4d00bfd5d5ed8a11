"""What a workload of `benchmarks/workloads` asks for: requests with prompts as names of blocks, never as tokens."""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

FOLDER = Path(__file__).parents[1] / "workloads"
PAGE_SIZE = 256
"""The engine's default."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A kind of replica: times of a step as in `serve_app.routing.score`, and its room."""

    name: str
    step_s: float
    request_s: float
    token_s: float
    step_tokens: int
    max_running: int
    kv_tokens: int
    safety_margin: float = 0.15
    """Share of the cache below which no further request is begun: the engine's default."""

    def prefill_s(self, num_tokens: float) -> float:
        """Gives what a prompt takes on an idle replica."""
        return num_tokens * self.token_s + self.step_s * max(1.0, num_tokens / self.step_tokens)


@dataclass(slots=True)
class Turn:
    """One request. names: of all full blocks of prompt and answer; segments: (name of a part, its tokens) of the
    prompt, for those who match text and not blocks.
    """

    number: int
    arrival: float
    tenant: str
    session: str | None
    prompt_tokens: int
    answer_tokens: int
    names: list[int]
    segments: list[tuple[int, int]]
    hint: int | None
    max_tokens: int
    think_s: float = 0.0
    next: "Turn | None" = None
    """Arrives think_s after this one has ended."""
    # What became of it.
    first_token_at: float = -1.0
    ended_at: float = -1.0
    hit_tokens: int = 0
    num_deaths: int = 0
    sent_at: float = -1.0
    replica: int = -1
    token: Any = None
    router: Any = None
    expected: int = 0


@dataclass(slots=True)
class Traffic:
    """Turns that begin a session, by arrival; the rest hang on them."""

    first: list[Turn]
    all: list[Turn] = field(default_factory=list)


def load(name: str) -> dict[str, Any]:
    """Gives a workload by its name."""
    read: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return read


def scales() -> dict[str, Scale]:
    """Gives the kinds of replicas by name."""
    read = yaml.safe_load((FOLDER / "replicas.yaml").read_text())
    return {name: Scale(name, **values) for name, values in read.items()}


def draw(workload: dict[str, Any], scale: Scale, *, num_replicas: int, utilisation: float, num_turns: int) -> Traffic:
    """Gives about `num_turns` requests that use so much of the fleet; the same for the same arguments."""
    rng = np.random.default_rng([workload["seed"], num_replicas, round(utilisation * 1000)])
    maker = _rollouts if workload["kind"] == "rollouts" else _conversations
    sessions = maker(workload, rng, num_turns)
    turns = [turn for session in sessions for turn in session]
    rate = utilisation * num_replicas / seconds_of_work(turns, scale) * len(sessions) / len(turns)
    # All samples of a prompt come at once, as one session of parallel turns.
    arrivals = _arrivals(workload, rng, len(sessions), rate)
    first = []
    for session, arrival in zip(sessions, arrivals, strict=True):
        for turn in session:
            turn.arrival = float(arrival)
        if workload["kind"] == "rollouts":
            first += session
            continue
        first.append(session[0])
        for turn, following in pairwise(session):
            turn.next = following
    for number, turn in enumerate(turns):
        turn.number = number
    return Traffic(first, turns)


def seconds_of_work(turns: list[Turn], scale: Scale) -> float:
    """Gives the seconds of a replica that a request takes in the mean, when batches are full and nothing is cached.

    A batch is full when all places are taken, or the cache is by requests of their mean size while they generate. So
    prefixes that are found make the fleet less busy than its utilisation says, whoever routes.
    """
    prompts = np.array([turn.prompt_tokens for turn in turns], dtype=float)
    answers = np.array([turn.answer_tokens for turn in turns], dtype=float)
    resident = float(((prompts + answers / 2) * answers).sum() / answers.sum())
    batch = min(scale.max_running, (1 - scale.safety_margin) * scale.kv_tokens / resident)
    per_token = scale.request_s + scale.step_s / batch
    return float(prompts.mean() * scale.token_s + answers.mean() * per_token)


def _arrivals(workload: dict[str, Any], rng: np.random.Generator, count: int, rate: float) -> Any:
    """Gives Poisson arrivals, or those of a process that is faster in bursts and as fast in the mean."""
    times = np.cumsum(rng.exponential(1.0, count)) / rate
    bursts = workload.get("bursts")
    if not bursts:
        return times
    period, burst, factor = bursts["period_s"], bursts["burst_s"], bursts["factor"]
    calm = (period - burst * factor) / (period - burst)
    cycles, within = np.divmod(times, period)
    in_burst = within < burst * factor
    return cycles * period + np.where(in_burst, within / factor, burst + (within - burst * factor) / calm)


def _conversations(workload: dict[str, Any], rng: np.random.Generator, num_turns: int) -> list[list[Turn]]:
    apps = workload["apps"]
    systems = _lengths(apps["prompt_tokens"], rng, apps["count"])
    spread = np.exp(apps["answer_spread"] * rng.standard_normal(apps["count"]))
    popularity = 1.0 / np.arange(1, apps["count"] + 1) ** apps["zipf"]
    mean_turns, limit = workload["turns"]["mean"], workload["turns"]["max"]
    names = iter(range(apps["count"], 2**62))
    sessions: list[list[Turn]] = []
    count = 0
    while count < num_turns:
        app = int(rng.choice(apps["count"], p=popularity / popularity.sum()))
        number = min(limit, int(rng.geometric(1.0 / mean_turns)))
        messages = _lengths(workload["message_tokens"], rng, number)
        if "first_message_tokens" in workload:
            messages[0] = _lengths(workload["first_message_tokens"], rng, 1)[0]
        answers = np.minimum(_lengths(workload["answer_tokens"], rng, number) * spread[app], workload["max_tokens"])
        think = rng.exponential(max(workload["think_s"], 1e-9), number)
        segments, chain, session = [(app, int(systems[app]))], _Chain(), []
        chain.add(*segments[0])
        for message, answer, think_s in zip(messages, np.maximum(answers, 1).astype(int), think, strict=True):
            segments.append((next(names), int(message)))
            chain.add(*segments[-1])
            prompt = chain.num_tokens
            if prompt + int(answer) > workload.get("max_context_tokens", 2**31):
                break
            of_prompt = list(segments)
            segments.append((next(names), int(answer)))
            chain.add(*segments[-1])
            session.append(Turn(
                0, 0.0, f"app {app}", f"s{len(sessions)}", prompt, int(answer), list(chain.names), of_prompt, None,
                workload["max_tokens"], float(think_s),
            ))  # fmt: skip
        if session:
            sessions.append(session)
            count += len(session)
    return sessions


def _rollouts(workload: dict[str, Any], rng: np.random.Generator, num_turns: int) -> list[list[Turn]]:
    samples, tail = workload["samples"], workload["answer_tokens"]
    sessions = []
    for number in range(-(-num_turns // samples)):
        usual = min(tail["least"] * (1 + rng.pareto(tail["pareto"])), tail["max"])
        sigma = workload["sample_sigma"]
        drawn = usual * np.exp(sigma * rng.standard_normal(samples + workload["hint_samples"]))
        drawn = np.clip(drawn, 1, workload["max_tokens"]).astype(int)
        prompt = int(_lengths(workload["prompt_tokens"], rng, 1)[0])
        hint = int(drawn[samples:].mean())
        group = []
        for sample in range(samples):
            chain = _Chain()
            chain.add(number, prompt)
            chain.add(2**40 + number * samples + sample, int(drawn[sample]))
            group.append(Turn(
                0, 0.0, "trainer", None, prompt, int(drawn[sample]), chain.names, [(number, prompt)], hint,
                workload["max_tokens"],
            ))  # fmt: skip
        sessions.append(group)
    return sessions


class _Chain:
    """The names of the full blocks of a text made of parts, where the name of a part stands for all before it."""

    def __init__(self) -> None:
        self.names: list[int] = []
        self.num_tokens = 0

    def add(self, part: int, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        for index in range(len(self.names), self.num_tokens // PAGE_SIZE):
            # Spread over 32 bits, as digests are.
            mixed = (part * 0x9E3779B97F4A7C15 + index * 0xC2B2AE3D27D4EB4F) & (2**64 - 1)
            self.names.append((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 >> 16 & 0xFFFFFFFF)


def _lengths(described: dict[str, Any], rng: np.random.Generator, count: int) -> Any:
    drawn = described["median"] * np.exp(described["sigma"] * rng.standard_normal(count))
    return np.clip(drawn, 1, described["max"])
