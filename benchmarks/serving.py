"""What serving costs beside the engine alone: HTTP streams of `pitstop serve` against the same requests in a process.

    python -m benchmarks.serving
    python -m benchmarks.serving --clients 16 --rounds 3

Starts `pitstop serve` with one replica, and a process with the engine of a replica and nothing around it. In each round
both get the same prompts at once, one after the other; whoever does not compute is up and idle. Processor seconds are
those of the processes' own counters, by role.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.report import machine
from benchmarks.workload import draw_prompts
from serve_app.cli.serve_config import Overrides, read_config
from serve_app.settings import AppSettings, parse_settings

CONFIG = Path(__file__).parents[1] / "configs" / "local.yaml"
READY_TIMEOUT_S, ANSWER_TIMEOUT_S, END_TIMEOUT_S = 300.0, 600.0, 30.0
IDLE_S = 5.0
"""Long enough for several of the second's heartbeats and Ray's own."""
WARM_UP = 4
READ_BYTES = 2**16
CLIENT, ENGINE, REPLICA = "clients", "the engine alone", "replica"
ROLES = {
    "ServeReplica:pitstop:EngineReplica": REPLICA,
    "ServeReplica:pitstop:Router": "router",
    "ServeReplica:pitstop:WeightController": "controller of weights",
    "ProxyActor": "Serve's proxy",
    "ServeController": "Serve's controller",
    "gcs_server": "Ray: gcs",
    "raylet/raylet": "Ray: raylet",
    "dashboard/dashboard.py": "Ray: dashboard",
    "dashboard/agent.py": "Ray: agents",
    "runtime_env/agent/main.py": "Ray: agents",
    "log_monitor.py": "Ray: agents",
    "monitor.py": "Ray: agents",
}
"""By a piece of the command line."""
OTHERS = "Ray: everything else"

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Stream:
    """Of one request, in seconds since the first was sent: its first tokens and its last."""

    first_s: float
    last_s: float
    num_tokens: int

    @property
    def token_s(self) -> float:
        """From one token to the next."""
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Pass:
    """All requests once. cpu_s: by role."""

    seconds: float
    streams: list[Stream]
    cpu_s: dict[str, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def token_s(self) -> float:
        return median(stream.token_s for stream in self.streams)

    @property
    def first_s(self) -> float:
        return median(stream.first_s for stream in self.streams)


def main() -> None:
    """Measures and prints."""
    options = _parse_arguments()
    with _served(options) as served, _engine_process(options) as engine:
        prompts = draw_prompts(options.clients, engine.ask("vocab_size"))
        for one in ("warm up", "again"):
            engine.ask((prompts[:WARM_UP], 8))
            _through_http(served, prompts[:WARM_UP], 8)
            print(one, file=sys.stderr)
        idle = _idle(served.process)
        alone, through_http = [], []
        for _ in range(options.rounds):
            alone.append(engine.ask((prompts, options.tokens)))
            through_http.append(_through_http(served, prompts, options.tokens))
            print(_line(alone[-1], through_http[-1]), file=sys.stderr)
    print(machine())
    print(f"Command: python -m benchmarks.serving {' '.join(sys.argv[1:])}".rstrip())
    print(report(alone, through_http, idle))


def report(alone: Sequence[Pass], through_http: Sequence[Pass], idle: dict[str, float]) -> str:
    """Gives the tables; the rounds are pairs. idle: processor seconds of a second without requests, by role."""
    lines = ["| | the engine alone | through HTTP | ratio |", "|---|---|---|---|"]
    for name, unit, scale, digits in (
        ("tokens_per_s", "tokens/s", 1, 1),
        ("token_s", "time per token, median, ms", 1e3, 1),
        ("first_s", "first token, median, s", 1, 2),
    ):
        one, other = (median(getattr(each, name) for each in passes) for passes in (alone, through_http))
        ratio = median(getattr(b, name) / getattr(a, name) for a, b in zip(alone, through_http, strict=True))
        lines.append(f"| {unit} | {one * scale:.{digits}f} | {other * scale:.{digits}f} | {ratio:.3f} |")
    pairs = [
        (each.num_tokens / each.cpu_s[role])
        for role, passes in ((ENGINE, alone), (REPLICA, through_http))
        for each in passes
    ]
    one, other = median(pairs[: len(alone)]), median(pairs[len(alone) :])
    lines.append(f"| tokens per processor second of engine and replica | {one:.1f} | {other:.1f} | {other / one:.3f} |")
    lines += ["", "| processor seconds of | through HTTP | share | a second of idling |", "|---|---|---|---|"]
    spent = {role: median(each.cpu_s.get(role, 0.0) for each in through_http) for role in through_http[0].cpu_s}
    total = sum(spent.values())
    for role, cpu_s in sorted(spent.items(), key=lambda item: -item[1]):
        lines.append(f"| {role} | {cpu_s:.2f} | {100 * cpu_s / total:.1f} % | {idle.get(role, 0.0):.3f} |")
    lines.append(f"| all | {total:.2f} | 100 % | {sum(idle.values()):.3f} |")
    engine_s = median(each.cpu_s[ENGINE] for each in alone)
    lines.append(f"\nThe engine alone took {engine_s:.2f} processor seconds, {_agreement(alone[-1], through_http[-1])}")
    return "\n".join(lines)


def _agreement(alone: Pass, through_http: Pass) -> str:
    same = sum(a == b for a, b in zip(alone.texts, through_http.texts, strict=True))
    return f"and {same} of {len(alone.texts)} texts are the same."


def _line(alone: Pass, through_http: Pass) -> str:
    return (
        f"alone {alone.tokens_per_s:.1f} tokens/s, {1e3 * alone.token_s:.1f} ms a token;"
        f" HTTP {through_http.tokens_per_s:.1f} tokens/s, {1e3 * through_http.token_s:.1f} ms a token"
    )


# Serving


@dataclass(frozen=True, slots=True)
class Application:
    """One that is ready: where it listens, what its model is called, and the process above all of its own."""

    port: int
    model: str
    process: psutil.Process


@contextmanager
def _served(options: argparse.Namespace) -> Iterator[Application]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from serve_app.cli import main; main()", "serve", str(options.config)]
    command += ["--port", str(port), "--replicas", "1", *(["--model", options.model] if options.model else [])]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("ready"):
                log.seek(0)
                raise SystemExit(f"pitstop serve did not start: {log.read().decode()[-2000:]}")
            yield Application(port, _settings(options.config, options.model).model_name, psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait(END_TIMEOUT_S)


def _through_http(served: Application, prompts: Prompts, num_tokens: int) -> Pass:
    """Sends all prompts at once, from a process of its own."""
    before = _cpu_by_role(served.process)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    clients = context.Process(target=_run_clients, args=(theirs, served.port, served.model, prompts, num_tokens))
    clients.start()
    theirs.close()
    try:
        found: Pass = _received(mine)
    finally:
        clients.join(END_TIMEOUT_S)
    after = _cpu_by_role(served.process)
    cpu_s = {role: seconds - before.get(role, 0.0) for role, seconds in after.items()}
    return Pass(found.seconds, found.streams, cpu_s | found.cpu_s, found.texts)


def _run_clients(answer: Connection, port: int, model: str, prompts: Prompts, num_tokens: int) -> None:
    answer.send(asyncio.run(ask_all(port, model, prompts, num_tokens)))


async def ask_all(port: int, model: str, prompts: Prompts, num_tokens: int) -> Pass:
    """Sends all prompts at once, each over a connection of its own, and reads their streams."""
    bodies = [_request(model, prompt, num_tokens) for prompt in prompts]
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in prompts]
    started, cpu_started = time.perf_counter(), time.process_time()
    answers = await asyncio.gather(*(_ask(*pair, body) for pair, body in zip(streams, bodies, strict=True)))
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    # Read after the clock has stopped: what a client makes of its text is its own affair.
    found = [read(pieces, started) for pieces in answers]
    return Pass(seconds, [stream for stream, _ in found], {CLIENT: cpu_s}, [text for _, text in found])


def _request(model: str, prompt: list[int], num_tokens: int) -> bytes:
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> list[tuple[float, bytes]]:
    writer.write(request)
    pieces = []
    while piece := await reader.read(READ_BYTES):
        pieces.append((time.perf_counter(), piece))
    writer.close()
    return pieces


def read(pieces: list[tuple[float, bytes]], started: float) -> tuple[Stream, str]:
    """Gives when tokens came, and the text: an event is not cut over chunks of HTTP, which are lines of their own."""
    whole = b"".join(piece for _, piece in pieces)
    if not whole.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"a request was refused: {whole[:500]!r}")
    events = [json.loads(line[6:]) for line in whole.splitlines() if line.startswith(b"data: {")]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    num_tokens = next(event["usage"]["completion_tokens"] for event in events if event.get("usage"))
    times = [at - started for at, piece in pieces if b'"text"' in piece]
    return Stream(times[0], times[-1], num_tokens), text


def _idle(served: psutil.Process) -> dict[str, float]:
    before = _cpu_by_role(served)
    time.sleep(IDLE_S)
    return {role: (seconds - before.get(role, 0.0)) / IDLE_S for role, seconds in _cpu_by_role(served).items()}


def _cpu_by_role(served: psutil.Process) -> dict[str, float]:
    spent: dict[str, float] = {}
    for process in served.children(recursive=True):
        try:
            title, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        role = role_of(title)
        spent[role] = spent.get(role, 0.0) + times.user + times.system
    return spent


def role_of(command: str) -> str:
    """Gives the role of a process by its command line."""
    program = command.split(" -", 1)[0]
    return next((role for piece, role in ROLES.items() if piece in program), OTHERS)


# The engine alone


@dataclass(frozen=True, slots=True)
class _EngineProcess:
    _connection: Any

    def ask(self, question: Any) -> Any:
        self._connection.send(question)
        return _received(self._connection)


@contextmanager
def _engine_process(options: argparse.Namespace) -> Iterator[_EngineProcess]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_run_engine, args=(theirs, str(options.config), options.model))
    process.start()
    theirs.close()
    try:
        yield _EngineProcess(mine)
    finally:
        with suppress(OSError):  # it has ended before
            mine.send(None)
        process.join(END_TIMEOUT_S)


def _run_engine(connection: Connection, config_file: str, model: str | None) -> None:
    """Answers until it is asked None: the size of the vocabulary, or prompts and how many tokens each gets."""
    from transformers import AutoTokenizer

    from serve_app.model_store import resolve_model
    from serve_app.ranks import start_engine

    settings = _settings(Path(config_file), model)
    path = resolve_model(settings.model)
    manager, tokenizer = start_engine(settings, path), AutoTokenizer.from_pretrained(path)
    while (question := connection.recv()) is not None:
        if question == "vocab_size":
            connection.send(manager.config.vocab_size)
        else:
            connection.send(asyncio.run(generate(manager, tokenizer, *question)))
    os._exit(0)


def _settings(config: Path, model: str | None) -> AppSettings:
    return parse_settings(read_config(config, Overrides(model=model, replicas=1)).args)


async def generate(manager: Any, tokenizer: Any, prompts: Prompts, num_tokens: int) -> Pass:
    """Submits all prompts at once and takes their tokens as they come."""
    from engine import SamplingParams

    times: dict[str, list[float]] = {}
    outputs: dict[str, list[int]] = {}
    have_ended = asyncio.Event()

    def take(output: Any) -> None:
        times[output.request_id].append(time.perf_counter())
        if output.is_finished():
            outputs[output.request_id] = list(output.generated_tokens)
        if len(outputs) == len(prompts):
            have_ended.set()

    sampling = SamplingParams(temperature=0, max_new_tokens=num_tokens, eos_token_ids=())
    started, cpu_started = time.perf_counter(), time.process_time()
    names = [f"alone-{started}-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        times[name] = []
        manager.register_result_handler(name, take)
        manager.add_request(prompt, name, streaming=True, sampling=sampling)
    await have_ended.wait()
    seconds, cpu_s = max(each[-1] for each in times.values()) - started, time.process_time() - cpu_started
    streams = [Stream(times[name][0] - started, times[name][-1] - started, len(outputs[name])) for name in names]
    return Pass(seconds, streams, {ENGINE: cpu_s}, [tokenizer.decode(outputs[name]) for name in names])


def _received(connection: Any) -> Any:
    try:
        if connection.poll(ANSWER_TIMEOUT_S):
            return connection.recv()
    except EOFError:
        raise SystemExit("a process ended before it answered") from None
    raise SystemExit(f"no answer for {ANSWER_TIMEOUT_S:.0f} s")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--model", help="a folder or hub id; that of the config when not given")
    parser.add_argument("--clients", type=int, default=64, help="requests at once")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens for each")
    parser.add_argument("--rounds", type=int, default=2, help="medians are of so many")
    return parser.parse_args()


if __name__ == "__main__":
    main()
