"""`pitstop status`: what the fleet serves, replica by replica, and how it came to it."""

import json
from typing import Any

import typer

from serve_app.cli.tables import plain_table, print_table


def print_status(fleet: dict[str, Any], *, as_json: bool) -> None:
    """What goes on, a table of the replicas and one of the versions; or the whole answer as JSON."""
    if as_json:
        typer.echo(json.dumps(fleet))
        return
    typer.echo(f"committed: version {fleet['history'][0]['version']}")
    if fleet["swap_in_progress"]:
        typer.echo(f"swap in progress: {fleet['swap_in_progress']}, phase {fleet['phase']}")
    for pause in fleet["pauses"]:
        typer.echo(f"paused: lease {pause['lease_id']}, {pause['remaining_s']:.0f} s left, by {pause['requested_by']}")
    if fleet["problem"]:
        typer.echo(f"problem: {fleet['problem']}")
    for failure in fleet["failures"]:
        parts = [failure["at"], failure["label"], failure["requested_by"], failure["error"]]
        typer.echo(f"not committed: {', '.join(part for part in parts if part)}")
    _print_replicas(fleet["replicas"])
    _print_versions(fleet["history"])


def _print_replicas(replicas: list[dict[str, Any]]) -> None:
    if not replicas:
        typer.echo("no replica has reported")
        return
    table = plain_table()
    for name in ("replica", "number", "version", "state", "running", "waiting", "KV cache", "ranks", "error"):
        is_number = name in ("number", "version", "running", "waiting", "KV cache")
        table.add_column(name, justify="right" if is_number else "left")
    for replica in replicas:
        table.add_row(
            replica["replica_id"],
            "" if replica["number"] is None else str(replica["number"]),
            str(replica["version"]),
            replica["state"],
            str(replica["num_running"]),
            str(replica["num_waiting"]),
            f"{100 * replica['kv_usage']:.0f} %",
            str(replica["num_ranks"]),
            replica["error"] or "",
        )
    typer.echo()
    print_table(table)


def _print_versions(history: list[dict[str, Any]]) -> None:
    table = plain_table()
    for name in ("version", "from", "label", "committed", "by", "pause", "in all"):
        table.add_column(name, justify="right" if name in ("version", "pause", "in all") else "left")
    for version in history:
        result = version["result"]
        table.add_row(
            str(version["version"]),
            _source(version["source"]) if version["source"] else "the model it was started with",
            version["label"],
            version["committed_at"],
            version["requested_by"],
            f"{1000 * result['paused_s']:.0f} ms" if result else "",
            f"{result['total_s']:.1f} s" if result else "",
        )
    typer.echo()
    print_table(table)


def _source(source: dict[str, Any]) -> str:
    if source.get("hub"):
        return f"hub {source['hub']}" + (f" at {source['revision']}" if source["revision"] else "")
    return str(source["path"] or " under ".join(source["layers"]))
