"""`pitstop bench` against an endpoint that answers as told, over real sockets."""

import asyncio
import json
import random
import threading
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serve_app.cli import main
from serve_app.cli.bench.figures import Figures, figures_of, percentiles
from serve_app.cli.bench.load import Level, Run, Timed
from serve_app.cli.bench.plot import draw, nice_step
from serve_app.cli.bench.prompts import read_prompts, synthetic_prompts
from serve_app.cli.failure import CommandFailed
from tests.ports import free_port

RUBBISH = {
    "words": "not json",
    "null": "null",
    "list": "[1]",
    "number": "7",
    "choices": '{"choices": 5}',
    "choice": '{"choices": [null]}',
    "usage": '{"choices": [], "usage": 5}',
    "count": '{"choices": [], "usage": {"completion_tokens": "many"}}',
    "error": '{"error": null}',
    "plain error": '{"error": "a sentence"}',
    "cut": '{"choices": [{"text": "a"}]}',
}
"""The one event of a stream that then ends."""
KEY = "user-0123456789abcdef"


@dataclass
class Endpoint:
    """An OpenAI endpoint whose models are what it does, and what it has seen."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    num_open: int = 0
    most_open: int = 0

    def app(self) -> Starlette:
        paths = ("/v1/chat/completions", "/v1/completions")
        routes = [Route(path, self.answer, methods=["POST"]) for path in paths]
        return Starlette(routes=[*routes, Route("/v1/models", self.models)])

    async def models(self, request: Request) -> Response:
        self.keys.add(request.headers.get("authorization", ""))
        return JSONResponse({"data": [{"id": "good"}]})

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        number = len(self.bodies)
        if body["model"] == "refuses":
            return JSONResponse({"error": {"message": f"request {number} is one too many"}}, 429)
        return StreamingResponse(self.events(body, is_chat="chat" in request.url.path))

    async def events(self, body: dict[str, Any], *, is_chat: bool) -> AsyncIterator[str]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            if body["model"] in RUBBISH:
                yield f"data: {RUBBISH[body['model']]}\n\n"
                return
            texts = ["a"] * (0 if body["model"] == "empty" else body["max_tokens"] // 2)
            for text in texts:
                await asyncio.sleep(0.005)
                choice = {"delta": {"content": text}} if is_chat else {"text": text}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
                if body["model"] == "breaks":
                    yield 'data: {"error": {"message": "the replica is lost"}}\n\n'
                    return
            if body["model"] != "uncounted":
                usage = {"prompt_tokens": 7, "completion_tokens": 2 * len(texts)}
                yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.num_open -= 1


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    port, found = free_port(), Endpoint()
    server = uvicorn.Server(uvicorn.Config(found.app(), port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    found.url = f"http://127.0.0.1:{port}"
    yield found
    server.should_exit = True
    thread.join(30)


def bench(monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint, *arguments: str | Path) -> int:
    """The exit status of the command."""
    monkeypatch.setattr("sys.argv", ["pitstop", "bench", "--url", endpoint.url, *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def levels(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return list(json.loads(capsys.readouterr().out)["levels"])


@pytest.mark.parametrize("kind", RUBBISH)
def test_rubbish_is_the_failure_of_its_request(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    options = ("--model", kind, "--completions", "--concurrency", "2", "--requests", "2", "--json")
    assert bench(monkeypatch, endpoint, *options) == 1
    (level,) = levels(capsys)
    assert (level["num_answered"], level["num_failed"], len(level["errors"])) == (0, 2, 1)


def test_a_plot_that_cannot_be_written_is_told_before_any_request(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench(monkeypatch, endpoint, "--plot", tmp_path / "none" / "figures.svg") == 1
    assert "there is no folder" in capsys.readouterr().err
    assert endpoint.bodies == []


def test_each_level_keeps_so_many_requests_open(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--concurrency", "3", "--requests", "12", "--max-tokens", "10", "--json")
    assert bench(monkeypatch, endpoint, *options) == 0
    assert endpoint.most_open == 3
    (level,) = levels(capsys)
    assert (level["num_answered"], level["num_failed"], level["errors"]) == (12, 0, {})
    assert level["tokens_per_answer"] == 10  # as the endpoint counts them, not chunks
    assert 0 < level["first_token_s"]["p50"] < level["total_s"]["p50"] <= level["total_s"]["p99"]
    assert level["token_s"]["p50"] == pytest.approx(
        (level["total_s"]["p50"] - level["first_token_s"]["p50"]) / 9, rel=0.5
    )
    assert level["tokens_per_s"] == pytest.approx(120 / level["wall_s"])
    assert level["prompt_tokens_per_s"] == pytest.approx(7 * 12 / level["wall_s"])


def test_at_a_rate_nobody_waits_for_the_answers_before(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--rate", "500", "--requests", "10", "--max-tokens", "100", "--json")
    assert bench(monkeypatch, endpoint, *options) == 0
    assert endpoint.most_open > 5
    (level,) = levels(capsys)
    assert (level["level"], level["num_answered"]) == ("500 a second", 10)


def test_a_body_says_what_was_asked_for(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PITSTOP_API_KEY", KEY)
    options = ("--requests", "1", "--concurrency", "1", "--max-tokens", "4", "--prompt-words", "5", "--ignore-eos")
    assert bench(monkeypatch, endpoint, *options, "--temperature", "0.5") == 0
    assert endpoint.keys == {f"Bearer {KEY}"}
    body = endpoint.bodies[-1]
    assert len(body["messages"][0]["content"].split()) == 5
    wanted = {"model": "good", "max_tokens": 4, "temperature": 0.5, "stream": True, "ignore_eos": True}
    assert wanted.items() <= body.items()
    assert bench(monkeypatch, endpoint, "--completions", "--requests", "1", "--concurrency", "1") == 0
    assert isinstance(endpoint.bodies[-1]["prompt"], str)
    assert "ignore_eos" not in endpoint.bodies[-1]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("refuses", "HTTP 429: request"),
        ("breaks", "the replica is lost"),
        ("empty", "the stream ended without a token"),
    ],
)
def test_failures_are_counted_by_kind_and_a_level_without_an_answer_is_one(
    model: str,
    message: str,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench(monkeypatch, endpoint, "--model", model, "--requests", "4", "--concurrency", "2") == 1
    shown = capsys.readouterr().out
    assert f"2 at once: 4 failed: {message}" in shown
    assert "latencies in ms" in shown


def test_where_nobody_counts_a_chunk_stands_for_a_token(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", "uncounted", "--requests", "2", "--concurrency", "1", "--max-tokens", "10", "--json")
    assert bench(monkeypatch, endpoint, *options) == 0
    assert levels(capsys)[0]["tokens_per_answer"] == 5


def test_an_answer_that_does_not_end_in_time_has_failed(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--requests", "1", "--concurrency", "1", "--max-tokens", "100000", "--timeout", "0.2", "--json")
    assert bench(monkeypatch, endpoint, *options) == 1
    assert levels(capsys)[0]["errors"] == {"no end within 0.2 s": 1}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--concurrency", "1,x"), "it must be whole numbers above 0"),
        (("--concurrency", "2.5"), "it must be whole numbers above 0"),
        (("--rate", "0"), "it must be numbers above 0"),
        (("--rate", "1", "--concurrency", "1"), "give one"),
        (("--rate", "nan"), "it must be numbers above 0"),
        (("--plot", "figures.png"), "name a file that ends in .svg or .html"),
        (("--prompts", "/nowhere"), "cannot be read"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: tuple[str, ...],
    reason: str,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench(monkeypatch, endpoint, "--model", "good", *arguments) == 1
    assert reason in capsys.readouterr().err
    assert endpoint.bodies == []


def test_an_endpoint_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = Endpoint(f"http://127.0.0.1:{free_port()}")
    assert bench(monkeypatch, nobody) == 1
    assert f"nothing answers at {nobody.url}" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_a_plot_has_every_level_and_asks_for_no_other_file(
    suffix: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / f"figures{suffix}"
    options = ("--concurrency", "1,2", "--requests", "3", "--max-tokens", "6", "--plot", file)
    assert bench(monkeypatch, endpoint, *options) == 0
    text = file.read_text()
    svg = text[text.index("<svg") : text.index("</svg>") + len("</svg>")]
    root = ET.fromstring(svg)
    circles = [node for node in root.iter("{http://www.w3.org/2000/svg}circle") if node.get("r") == "3"]
    assert len(circles) == 2 * (1 + 3 * 3)
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_a_plot_of_what_was_never_answered_can_be_drawn() -> None:
    failed = Run(Level(rate=2.0), [Timed(error="no")], wall_s=1.0)
    assert "<svg" in draw([figures_of(failed)], title="<none>")
    assert "<none>" not in draw([figures_of(failed)], title="<none>")


def test_messages_that_differ_in_numbers_alone_are_one_kind() -> None:
    run = Run(Level(concurrency=1), [Timed(error=f"{index} tokens") for index in range(5)], wall_s=1.0)
    run.requests.append(Timed(error="lost"))
    found: Figures = figures_of(run)
    assert found.errors == {"0 tokens": 5, "lost": 1}


def test_percentiles_lie_between_the_values_around_them() -> None:
    assert percentiles([]) == {}
    assert percentiles([2.0]) == {50: 2.0, 90: 2.0, 95: 2.0, 99: 2.0}
    values = [float(value) for value in range(101)]
    random.Random(0).shuffle(values)
    assert percentiles(values) == {50: 50.0, 90: 90.0, 95: 95.0, 99: 99.0}
    assert percentiles([0.0, 1.0])[50] == 0.5


@pytest.mark.parametrize("highest", [0.003, 0.9, 1.0, 7.3, 40.0, 99_999.0])
def test_an_axis_has_four_to_ten_steps(highest: float) -> None:
    step = nice_step(highest)
    assert 4 <= highest / step <= 10.0001


def test_prompts_of_a_file_come_round_again(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    file.write_text(f'one\n\n{json.dumps(chat)}\n{{"prompt": "three"}}\n')
    found = read_prompts(file, 4, is_chat=True)
    assert found[1] == chat
    assert [entry["messages"][-1]["content"] for entry in found] == ["one", "Hi", "three", "one"]
    with pytest.raises(CommandFailed, match="line 2 has no prompt"):
        read_prompts(file, 4, is_chat=False)
    file.write_text("{")
    with pytest.raises(CommandFailed, match="line 1 is no JSON that could be sent"):
        read_prompts(file, 1, is_chat=True)
    file.write_text("\n")
    with pytest.raises(CommandFailed, match="holds no prompt"):
        read_prompts(file, 1, is_chat=True)


@pytest.mark.parametrize("line", ['{"prompt": "\\ud800"}', '{"prompt": ' + "[" * 100_000, '{"messages": [}'])
def test_a_prompt_that_cannot_be_sent_is_told(line: str, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text(f"a text\n{line}\n")
    with pytest.raises(CommandFailed, match="line 2 is no JSON that could be sent: "):
        read_prompts(tmp_path / "prompts", 1, is_chat=True)


@pytest.mark.parametrize("url", ["", "x", "ftp://x", "http://", "http://127.0.0.1:99999", "http://a:b", "http://a\x00"])
@pytest.mark.parametrize("command", [("bench", "--model", "m", "--requests", "1"), ("bench",), ("status",)])
def test_a_url_below_which_nothing_can_be_asked_is_told(
    command: tuple[str, ...], url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PITSTOP_ADMIN_KEY", KEY)
    monkeypatch.setattr("sys.argv", ["pitstop", *command, "--url", url])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err == (
        f"pitstop: --url is {url!r}; it must be http:// or https:// with a host, such as http://127.0.0.1:8000\n"
    )


def test_a_key_that_no_header_carries_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PITSTOP_API_KEY", "schl\u00fcssel-0123456789")
    monkeypatch.setattr("sys.argv", ["pitstop", "bench", "--model", "m"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err == (
        "pitstop: the key of PITSTOP_API_KEY cannot be sent: it must be printable ASCII\n"
    )


def test_made_up_prompts_are_the_same_for_a_seed_and_differ_from_each_other() -> None:
    one, other = (synthetic_prompts(5, num_words=8, seed=3, is_chat=False) for _ in range(2))
    assert one == other
    assert len({entry["prompt"] for entry in one}) == 5
