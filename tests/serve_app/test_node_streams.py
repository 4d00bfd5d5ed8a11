"""Waiting until a machine answers nobody any more, by a page of Ray's metrics agent."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from serve_app import cli
from serve_app.cli import node_streams
from serve_app.cli.failure import CommandFailed
from serve_app.cli.node_streams import QUIET_FOR_S, num_answered, wait_for_streams
from tests.ports import free_port

PROXY, ROUTER = node_streams.ANSWERING
ONE_EACH = f'# TYPE {PROXY} gauge\n{PROXY}{{NodeId="n"}} 2.0\n# TYPE {ROUTER} gauge\n{ROUTER}{{router="0"}} 3.0\n'
NOBODY = f'{PROXY}{{NodeId="n"}} 0.0\n{ROUTER}{{router="0"}} 0.0\n'
ROUTER_GONE = f'{PROXY}{{NodeId="n"}} 0.0\n'


class Agent:
    """Gives one page after the other, by the time that the waiting counts; the last one for ever."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pages: list[tuple[float, int, str]] = []
        agent = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, page = next((s, p) for until, s, p in agent.pages if agent.now < until)
                self.send_response(status)
                self.send_header("content-length", str(len(page)))
                self.end_headers()
                self.wfile.write(page.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.port = self.server.server_port

    def wait(self, timeout_s: float) -> int:
        url = f"http://127.0.0.1:{self.port}/metrics"
        return wait_for_streams(url, timeout_s=timeout_s, clock=lambda: self.now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_stream_through_proxy_and_router_counts_once() -> None:
    assert [num_answered(page) for page in (ONE_EACH, NOBODY, ROUTER_GONE, "")] == [3, 0, 0, 0]


def test_the_end_of_the_last_stream_is_waited_for_and_a_little_longer(agent: Agent) -> None:
    agent.pages = [(100.0, 200, ONE_EACH), (1e9, 200, NOBODY)]
    assert agent.wait(480.0) == 0
    assert 100.0 + QUIET_FOR_S - 3 <= agent.now <= 100.0 + QUIET_FOR_S + 3


def test_a_stream_that_the_page_shows_late_is_waited_for(agent: Agent) -> None:
    agent.pages = [(15.0, 200, NOBODY), (60.0, 200, ONE_EACH), (1e9, 200, NOBODY)]
    assert agent.wait(480.0) == 0
    assert agent.now >= 60.0 + QUIET_FOR_S - 3


def test_a_router_that_is_gone_is_not_waited_for(agent: Agent) -> None:
    agent.pages = [(30.0, 200, ONE_EACH), (1e9, 200, ROUTER_GONE)]
    assert agent.wait(480.0) == 0
    assert agent.now <= 30.0 + QUIET_FOR_S + 3


def test_the_time_is_up_where_streams_go_on(agent: Agent) -> None:
    agent.pages = [(1e9, 200, ONE_EACH)]
    assert agent.wait(480.0) == 3
    assert agent.now == pytest.approx(480.0)


def test_a_page_that_fails_is_asked_for_again(agent: Agent) -> None:
    agent.pages = [(50.0, 500, "no"), (1e9, 200, NOBODY)]
    assert agent.wait(480.0) == 0
    assert agent.now >= 50.0 + QUIET_FOR_S - 3
    agent.now, agent.pages = 0.0, [(1e9, 500, "no")]
    with pytest.raises(CommandFailed, match="gave no page of metrics within 100 s"):
        agent.wait(100.0)


def test_where_ray_has_ended_nobody_is_answered() -> None:
    assert wait_for_streams(f"http://127.0.0.1:{free_port()}/metrics", timeout_s=480.0) == 0


def test_the_command_fails_where_streams_are_left(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent.pages = [(1e9, 200, ONE_EACH)]
    arguments = ["pitstop", "wait-streams", "--metrics-port", str(agent.port), "--timeout", "0"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "3 HTTP request(s) are still answered there" in capsys.readouterr().out
