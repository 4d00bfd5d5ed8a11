"""`pitstop doctor`: what is wrong with this machine or a config, why it matters, and what to do."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from serve_app.cli.doctor.finding import Finding, Findings, Level, error
from serve_app.cli.progress import progress
from serve_app.cli.serve_config import Overrides
from serve_app.cli.tables import plain_table, print_table
from serve_app.model_store import default_cache_dir

MARKS = {Level.GOOD: ("ok", "green"), Level.WARNING: ("warning", "yellow"), Level.ERROR: ("error", "bold red")}


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="A Serve config file to look at, too, such as configs/local.yaml.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="As of pitstop serve.")] = None,
    model: Annotated[str | None, typer.Option(help="As of pitstop serve.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="As of pitstop serve.")] = None,
    cache_dir: Annotated[
        Path, typer.Option(help="Folder of converted models, logs and the made-up admin key.")
    ] = default_cache_dir(),  # noqa: B008  # typer's way to show a default
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Explain what is wrong with this machine, and with a config: exit status 1 where something would fail."""
    with progress("looking at the machine"):
        found = examine(config, Overrides(port=port, model=model, replicas=replicas), cache_dir=cache_dir)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in found]))
    else:
        _print(found)
    if any(finding.level == Level.ERROR for finding in found):
        raise typer.Exit(1)


def examine(config: Path | None, overrides: Overrides, *, cache_dir: Path) -> list[Finding]:
    """Gives everything that is to be said; of a config only where there is one."""
    # Loading torch takes seconds, which the other commands need not wait for.
    from serve_app.cli.doctor import application, machine, packages
    from serve_app.settings import inherited_environment

    environment = inherited_environment(defaults={}, added={})
    checks: list[Callable[[], Findings]] = [
        packages.check_python,
        packages.check_packages,
        machine.check_cores_and_memory,
        machine.check_gpu,
        machine.check_shared_memory,
        machine.check_disk,
        partial(machine.check_cache_folder, cache_dir),
        machine.check_open_files,
        partial(machine.check_numba_cache, environment),
        partial(machine.check_ray, environment),
    ]
    if config is not None:
        look = partial(application.check_application, config, overrides, cache_dir=cache_dir, environment=environment)
        checks.append(look)
    return [finding for check in checks for finding in _carried_out(check)]


def _carried_out(check: Callable[[], Findings]) -> list[Finding]:
    try:
        return list(check())
    except Exception as problem:  # noqa: BLE001  # a check that fails is a finding, and the others go on
        what = f"the check failed: {type(problem).__name__}: {problem}"
        name = getattr(check, "__name__", None) or getattr(check, "func", check).__name__
        subject = str(name).removeprefix("check_").replace("_", " ")
        return [error(subject, what, why="what it looks at is not known", remedy="see the message")]


def _print(found: list[Finding]) -> None:
    table = plain_table()
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found:
        mark, style = MARKS[finding.level]
        text = Text(finding.what)
        if finding.why:
            text.append(f"\n{finding.why}", style="dim")
        if finding.remedy:
            text.append("\n-> ", style="dim").append(finding.remedy)
        table.add_row(Text(mark, style=style), finding.subject, text)
    print_table(table)
    counts = {level: sum(finding.level == level for finding in found) for level in Level}
    typer.echo(f"{counts[Level.ERROR]} error(s), {counts[Level.WARNING]} warning(s)")
