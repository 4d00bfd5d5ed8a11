"""`pitstop serve` as a user starts and ends it: a real Ray, a tiny random model, real signals."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.ports import free_port
from tests.serve_app.tiny_model import make_model_folder

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
EXAMPLES = sorted((CONFIGS / "examples").glob("*.yaml"))
COMMAND = [sys.executable, "-c", "from serve_app.cli import main; main()"]
READY_S = 240.0
"""Twenty seconds on an idle machine; tests share two cores with others."""
GONE_S = 10.0
KILLED_GONE_S = 20.0
"""After kill -9 of the launcher its supervisor ends the rest: in ten seconds, too, but nobody waits for it."""


@dataclass
class Launcher:
    """One `pitstop serve`, its port, and every process seen below it."""

    process: subprocess.Popen[str]
    port: int
    cache_dir: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_until_ready(self) -> list[str]:
        """The three lines it prints."""
        assert self.process.stdout is not None
        return [self.process.stdout.readline() for _ in range(3)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


@contextmanager
def launched(
    model: Path, cache_dir: Path, *, config: Path = CONFIGS / "local.yaml", others: Sequence[str] = ("--replicas", "1")
) -> Iterator[Launcher]:
    port = free_port()
    options = ["--port", str(port), "--model", str(model), "--cache-dir", str(cache_dir), *others]
    process = subprocess.Popen(
        [*COMMAND, "serve", str(config), *options],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        launcher = Launcher(process, port, cache_dir)
        try:
            yield launcher
        finally:
            left = [] if process.poll() is not None else launcher.descendants()
            process.terminate()
            for remaining in left:
                _kill(remaining)


def wait_until(condition: Callable[[], object], *, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s} s"
        time.sleep(0.05)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if _is_alive(process)]


def test_it_serves_swaps_and_ends_within_ten_seconds_of_ctrl_c(model_folder: Path, tmp_path: Path) -> None:
    with launched(model_folder, tmp_path) as launcher:
        ready, _, swap = launcher.wait_until_ready()
        assert ready.split() == ["ready:", launcher.url]
        assert swap.split()[2:] == ["swap", "--path", "FOLDER", "--url", launcher.url]
        options = ["--url", launcher.url, "--cache-dir", str(tmp_path)]
        swapped = subprocess.run(
            [*COMMAND, "swap", "--path", str(model_folder), "--json", *options], capture_output=True, check=True
        )
        assert json.loads(swapped.stdout)["version"] == 2
        request = {"model": "tiny", "prompt": "a", "max_tokens": 2000, "stream": True}
        with httpx.stream("POST", f"{launcher.url}/v1/completions", json=request, timeout=60) as stream:
            assert next(stream.iter_lines()).startswith("data:")
            processes = launcher.descendants()
            launcher.process.send_signal(signal.SIGINT)
            assert launcher.process.wait(GONE_S) == 0
        assert alive(processes) == []


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_serves_with_the_replicas_it_asks_for(config: Path, model_folder: Path, tmp_path: Path) -> None:
    with launched(model_folder, tmp_path, config=config, others=()) as launcher:
        launcher.wait_until_ready()
        request = {"model": "tiny", "prompt": "a", "max_tokens": 8, "ignore_eos": True, "user": "somebody"}
        answer = httpx.post(f"{launcher.url}/v1/completions", json=request, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        wanted = yaml.safe_load(config.read_text())["applications"][0]["args"]["replicas"]["min"]
        wait_until(lambda: _num_ready(launcher) == wanted, deadline_s=READY_S)
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.process.wait(GONE_S) == 0


def _num_ready(launcher: Launcher) -> int:
    replicas = httpx.get(f"{launcher.url}/wall/data", timeout=60).json()["replicas"]
    return sum(replica["state"] == "ready" for replica in replicas)


def test_a_signal_during_start_up_leaves_no_process(model_folder: Path, tmp_path: Path) -> None:
    with launched(model_folder, tmp_path) as launcher:
        wait_until(lambda: any("raylet" in child.name() for child in launcher.descendants()), deadline_s=READY_S)
        processes = launcher.descendants()
        launcher.process.terminate()
        assert launcher.process.wait(GONE_S) == 0
        assert alive(processes) == []


def test_a_killed_launcher_takes_everything_with_it(model_folder: Path, tmp_path: Path) -> None:
    with launched(model_folder, tmp_path) as launcher:
        launcher.wait_until_ready()
        processes = launcher.descendants()
        launcher.process.kill()
        _, left = psutil.wait_procs(processes, timeout=KILLED_GONE_S)
        assert alive(left) == []


def test_a_model_that_cannot_be_served_is_refused_in_one_sentence(model_folder: Path, tmp_path: Path) -> None:
    broken = Path(make_model_folder(tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "t5", "architectures": ["T5Model"]}))
    with launched(broken, tmp_path / "cache") as launcher:
        output, errors = launcher.process.communicate(timeout=READY_S)
        assert output == ""
        assert launcher.process.returncode == 1
    last_line = errors.strip().splitlines()[-1]
    assert last_line.startswith("pitstop: the application failed to start: EngineReplica")
    assert "Traceback" not in errors


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
