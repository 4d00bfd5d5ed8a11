"""`pitstop bench`: drives load against any OpenAI endpoint and tells what it is like to be its client."""

import asyncio
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from serve_app.cli.admin import DEFAULT_URL, check_url, is_this_machine
from serve_app.cli.bench.figures import Figures, figures_of
from serve_app.cli.bench.load import Level, Target, run_level
from serve_app.cli.bench.plot import check_format, write_plot
from serve_app.cli.bench.prompts import read_prompts, synthetic_prompts
from serve_app.cli.failure import CommandFailed
from serve_app.cli.tables import plain_table, print_table

MODELS_TIMEOUT_S = 10.0
NUM_WARM_UP = 2
"""Requests before the first level that count for nothing: the first connection, a first compilation."""

DEFAULT_LEVELS = "1,4,16"


def bench(
    url: Annotated[str, typer.Option(help="Root of the endpoint; /v1/... is asked below it.")] = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option(help="Name of the model; else the first that the endpoint lists.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help=f"Requests at once: levels, with commas between; {DEFAULT_LEVELS} where none is.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Requests a second in place of --concurrency: levels, at random times.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each level.")] = 32,
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts: a text a line, or JSON with prompt or messages.")
    ] = None,
    prompt_words: Annotated[int, typer.Option(min=1, help="Words of a made-up prompt.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 64,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of full length; an extension of vLLM and Pitstop.")
    ] = False,
    completions: Annotated[bool, typer.Option("--completions", help="/v1/completions in place of chats.")] = False,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of made-up prompts and random times.")] = 0,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for one request.")] = 300.0,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures to this .svg or .html file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="PITSTOP_API_KEY", show_envvar=False, hidden=True)] = None,
) -> None:
    """Drive load against any OpenAI endpoint: latencies, throughput, errors; exit status 1 where a level has no answer.

    A key is taken from PITSTOP_API_KEY.
    """
    if plot is not None:
        check_format(plot)
    levels = _levels(concurrency, rate)
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise CommandFailed("the key of PITSTOP_API_KEY cannot be sent: it must be printable ASCII")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    url = check_url(url).removesuffix("/v1")
    body: dict[str, Any] = {
        "model": model or _first_model(url, headers),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        body["ignore_eos"] = True
    path = "/v1/completions" if completions else "/v1/chat/completions"
    target = Target(url, path, headers, body, timeout_s, trusts_environment=not is_this_machine(url))
    number = NUM_WARM_UP + requests * len(levels)
    asked = (
        synthetic_prompts(number, num_words=prompt_words, seed=seed, is_chat=not completions)
        if prompts is None
        else read_prompts(prompts, number, is_chat=not completions)
    )
    found = asyncio.run(_run(target, levels, asked, requests=requests, seed=seed))
    if as_json:
        typer.echo(json.dumps({"url": url, "model": body["model"], "levels": [one.as_json() for one in found]}))
    else:
        _print(found, title=f"{body['model']} at {url}")
    if plot is not None:
        write_plot(found, plot, title=f"{body['model']}, up to {max_tokens} tokens an answer")
    if any(not one.num_answered for one in found):
        raise typer.Exit(1)


async def _run(
    target: Target, levels: Sequence[Level], prompts: Sequence[dict[str, Any]], *, requests: int, seed: int
) -> list[Figures]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found = []
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        warm_up, rest = prompts[:NUM_WARM_UP], prompts[NUM_WARM_UP:]
        await run_level(target, Level(concurrency=1), warm_up, seed=seed)
        for index, level in enumerate(levels):
            task = bar.add_task(level.name, total=requests)
            part = rest[index * requests : (index + 1) * requests]
            run = await run_level(target, level, part, seed=seed, report=partial(bar.advance, task))
            found.append(figures_of(run))
    return found


def _levels(concurrency: str | None, rate: str | None) -> list[Level]:
    if rate is None:
        numbers = _numbers("--concurrency", concurrency or DEFAULT_LEVELS, whole=True)
        return [Level(concurrency=int(number)) for number in numbers]
    if concurrency is not None:
        raise CommandFailed(f"--rate is {rate!r} and --concurrency is {concurrency!r}; load has one of them, give one")
    return [Level(rate=number) for number in _numbers("--rate", rate, whole=False)]


def _numbers(option: str, text: str, *, whole: bool) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    # Not so many that they could not be told apart, and none that is no number.
    is_right = all(0 < number < 1e6 and (number.is_integer() or not whole) for number in numbers)
    if not numbers or not is_right:
        kind = "whole numbers" if whole else "numbers"
        raise CommandFailed(f"{option} is {text!r}; it must be {kind} above 0 with commas between, such as 1,4,16")
    return numbers


def _first_model(url: str, headers: dict[str, str]) -> str:
    try:
        response = httpx.get(
            f"{url}/v1/models", headers=headers, timeout=MODELS_TIMEOUT_S, trust_env=not is_this_machine(url)
        )
        return str(response.raise_for_status().json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        hint = "; set PITSTOP_API_KEY" if error.response.status_code == httpx.codes.UNAUTHORIZED else ""
        raise CommandFailed(f"{url}/v1/models answers HTTP {error.response.status_code}{hint}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandFailed(f"nothing answers at {url} ({error}); name the endpoint with --url") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise CommandFailed(f"{url}/v1/models lists no model; name one with --model") from error


def _print(found: Sequence[Figures], *, title: str) -> None:
    table = plain_table()
    for name in (
        "requests",
        "answered",
        "failed",
        "tokens/s",
        "requests/s",
        "first token",
        "per token",
        "whole answer",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        table.add_row(
            one.level,
            str(one.num_answered),
            str(one.num_failed),
            f"{one.tokens_per_s:.1f}",
            f"{one.requests_per_s:.2f}",
            *(_latency(latency) for latency in (one.first_token_s, one.token_s, one.total_s)),
        )
    typer.echo(f"{title}; latencies in ms: p50 / p95 / p99")
    print_table(table)
    for one in found:
        for message, number in one.errors.items():
            typer.echo(f"{one.level}: {number} failed: {message}")


def _latency(found: dict[int, float]) -> str:
    if not found:
        return "-"
    return " / ".join(f"{1000 * found[percent]:.{1 if found[percent] < 0.1 else 0}f}" for percent in (50, 95, 99))
