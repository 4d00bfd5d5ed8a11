"""`pitstop serve`: check, render the config, run `serve run` as a child, wait until ready, supervise, end all."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer

from serve_app.bearer_keys import parse_keys
from serve_app.cli.admin import DEFAULT_URL
from serve_app.cli.failure import CommandFailed
from serve_app.cli.key_file import ensure_key_file
from serve_app.cli.preflight import (
    cache_failure,
    check_cache_dir,
    check_device,
    check_memory,
    check_port,
    check_weight_folder,
    locate_model,
)
from serve_app.cli.processes import end_supervised, start_supervised
from serve_app.cli.progress import progress
from serve_app.cli.serve_config import Overrides, ServeConfig, read_config
from serve_app.cli.startup import Startup

SERVE_DEFAULTS = {
    # Fewer hops for every chunk of a stream: measured 2 to 4 times the chunks a second of Serve's defaults.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Part of that mode, but it opens the replicas' own ports on every interface and replaces the proxy.
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Environment of the child where the user has not set these."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """Somebody asked for the end; not an Exception, so that no handler on the way takes it for a failure."""


def launch(config_file: Path, overrides: Overrides, *, cache_dir: Path) -> None:
    """Serve until a signal, which ends this process, or the child's end, which raises CommandFailed.

    Leaves no process behind in either case.
    """
    config = read_config(config_file, overrides)
    check_port(config.host, config.port)
    rendered = cache_dir / "run" / f"serve-{config.port}.yaml"
    check_cache_dir(rendered.parent)
    environment = _check_application(config, cache_dir=cache_dir)
    _write(config, rendered)
    child: subprocess.Popen[bytes] | None = None
    try:
        with _stop_on_signal():
            command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", "local", str(rendered)]
            log_file = rendered.with_suffix(".log")
            child = _start(command, environment=environment, log_file=log_file)
            _run(Startup(child=child, log_file=log_file, config=config))
    except Stopped:
        _end(child)
        # All that was started has ended. Unloading torch would take seconds more of the ten that a stop may take.
        os._exit(0)
    except BaseException:
        _end(child)
        raise


def _write(config: ServeConfig, rendered: Path) -> None:
    try:
        config.write(rendered)
    except OSError as error:
        raise cache_failure(rendered, error.strerror) from error


def _start(command: list[str], *, environment: Mapping[str, str], log_file: Path) -> subprocess.Popen[bytes]:
    try:
        return start_supervised(command, environment=environment, log_file=log_file)
    except OSError as error:
        raise CommandFailed(
            f"Ray Serve cannot be started with its log in {log_file}: {error.strerror}; name another folder with"
            " --cache-dir where the log is at fault"
        ) from error


def _end(child: subprocess.Popen[bytes] | None) -> None:
    if child is not None:
        with _handling(signal.SIG_IGN), progress("stopping"):
            end_supervised(child)


def _run(startup: Startup) -> None:
    with progress("starting Ray and Serve") as report:
        startup.wait(report)
    announce(startup.config)
    startup.child.wait()
    raise CommandFailed(f"Ray Serve ended by itself: {startup.last_lines()}")


def _check_application(config: ServeConfig, *, cache_dir: Path) -> dict[str, str]:
    """Check what the config asks of this machine; put the model's folder and name into it, give an environment."""
    # Importing the engine's torch takes seconds, which the other commands and refusals need not wait for.
    from serve_app.settings import ADMIN_KEY_FILE_VARIABLE, inherited_environment, parse_settings

    try:
        if (problem := config.problem()) is not None:
            raise ValueError(problem)
        settings = parse_settings(config.args)
        has_admin_key = settings.admin_key() is not None
        parse_keys(settings.api_keys(), what="API key")
    except ValueError as error:
        raise CommandFailed(str(error)) from error
    fleet = settings.replicas
    check_device(settings.device, num_gpus=fleet.least_gpus)
    for setting, place in settings.weights.named_folders.items():
        check_weight_folder(setting, place)
    config.args["served_model_name"] = settings.model_name
    config.args["model"] = model = locate_model(settings.model, cache_dir=cache_dir)
    if Path(model).is_dir() and not fleet.num_gpus:
        check_memory(Path(model), replicas=fleet.max, ranks=fleet.tensor_parallel_size, dtype=settings.dtype)
    added = {} if has_admin_key else {ADMIN_KEY_FILE_VARIABLE: str(ensure_key_file(cache_dir))}
    return inherited_environment(defaults=SERVE_DEFAULTS, added=added)


def announce(config: ServeConfig) -> None:
    """Three lines on stdout: where it listens, a request to try, and how to change the weights."""
    from serve_app.settings import parse_settings

    question = [{"role": "user", "content": "What is the capital of France?"}]
    request = json.dumps({"model": config.args["served_model_name"], "messages": question, "temperature": 0})
    options = "" if config.url == DEFAULT_URL else f" --url {config.url}"
    if config.args.get("admin_key_file"):
        options += f" --admin-key-file {config.args['admin_key_file']}"
    headers = "-H 'content-type: application/json'"
    if parse_settings(config.args).api_keys().is_set:
        headers += " -H 'authorization: Bearer KEY'"
    typer.echo(f"ready:  {config.url}")
    typer.echo(f"try:    curl {config.url}/v1/chat/completions {headers} -d '{request}'")
    typer.echo(f"swap:   {_program()} swap --path FOLDER{options}")
    sys.stdout.flush()


def _program() -> str:
    """How the user called this command, so that the printed one works in the same shell."""
    return sys.argv[0] if "/" in sys.argv[0] and not shutil.which("pitstop") else "pitstop"


@contextmanager
def _stop_on_signal() -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Stopped

    with _handling(stop):
        yield


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
