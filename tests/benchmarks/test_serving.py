"""What the benchmark of serving makes of what it saw."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.serving import CLIENT, ENGINE, REPLICA, Pass, Stream, ask_all, generate, read, report, role_of
from serve_app.settings import parse_settings
from tests.serve_app.local_app import local_app
from tests.serve_app.tiny_model import make_model_folder


def event(text: str | None, **more: object) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text}]
    return b"data: " + json.dumps({"choices": choices, **more}, separators=(",", ":")).encode() + b"\n\n"


def chunked(content: bytes) -> bytes:
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def test_a_stream_begins_with_its_first_text_and_ends_with_its_last() -> None:
    pieces = [
        (10.5, HEAD),
        (11.0, chunked(event("a"))),
        (12.0, chunked(event("b")) + chunked(event("c"))),
        (12.5, chunked(event(None, usage={"completion_tokens": 5})) + chunked(b"data: [DONE]\n\n")),
    ]
    stream, text = read(pieces, 10.0)
    assert (stream, text) == (Stream(first_s=1.0, last_s=2.0, num_tokens=5), "abc")
    assert stream.token_s == 0.25


def test_a_refusal_is_told() -> None:
    with pytest.raises(SystemExit, match=r"HTTP/1\.1 429"):
        read([(0.0, b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}")], 0.0)


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("ray::ServeReplica:pitstop:EngineReplica.generate", REPLICA),
        ("ray::SERVE_REPLICA::pitstop#Router#x:ServeReplica:pitstop:Router", "router"),
        ("ray::ProxyActor", "Serve's proxy"),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/gcs_server", "Ray: raylet"),
        ("/x/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp/raylet", "Ray: gcs"),
        ("ray::IDLE", "Ray: everything else"),
    ],
)
def test_processes_are_told_apart_by_what_they_run(command: str, role: str) -> None:
    assert role_of(command) == role


def test_ratios_are_those_of_pairs() -> None:
    stream = Stream(first_s=1.0, last_s=2.0, num_tokens=11)
    slower = Stream(first_s=1.5, last_s=3.0, num_tokens=11)
    alone = [Pass(2.0, [stream], {ENGINE: 4.0}, ["a"]), Pass(4.0, [stream], {ENGINE: 4.0}, ["a"])]
    through_http = [
        Pass(4.0, [slower], {REPLICA: 5.0, CLIENT: 1.0}, ["a"]),
        Pass(5.0, [slower], {REPLICA: 5.0, CLIENT: 3.0}, ["b"]),
    ]
    lines = report(alone, through_http, {REPLICA: 0.25})
    assert "| tokens/s | 4.1 | 2.5 | 0.650 |" in lines
    assert "| time per token, median, ms | 100.0 | 150.0 | 1.500 |" in lines
    assert "| tokens per processor second of engine and replica | 2.8 | 2.2 | 0.800 |" in lines
    assert "| replica | 5.00 | 71.4 % | 0.250 |" in lines
    assert "| clients | 2.00 | 28.6 % | 0.000 |" in lines
    assert "0 of 1 texts are the same" in lines


async def test_both_ways_generate_the_same(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "base")
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
    engine = {"page_size": 16, "num_blocks": 64}
    with local_app(parse_settings({"model": model, "served_model_name": "tiny", "engine": engine})) as app:
        port = int(app.url.rsplit(":", 1)[1])
        through_http = await ask_all(port, "tiny", prompts, 12)
        alone = await generate(app.manager, AutoTokenizer.from_pretrained(model), prompts, 12)
    assert through_http.texts == alone.texts
    assert through_http.num_tokens == alone.num_tokens == 3 * 12
    for each in (through_http, alone):
        assert all(0 < stream.first_s <= stream.last_s <= each.seconds for stream in each.streams)
