"""`pitstop swap`, `pitstop rollback` and `pitstop status`: the admin routes over HTTP."""

import json
from ipaddress import ip_address
from typing import Any

import httpx
import typer

from serve_app.cli.failure import CommandFailed

DEFAULT_URL = "http://127.0.0.1:8000"
STATUS_TIMEOUT_S = 10.0
SWAP_TIMEOUT_S = 900.0
"""Above the application's own deadlines for staging and committing, so that its answer arrives."""


class AdminApi:
    """The admin routes of one application; every failure is a CommandFailed."""

    def __init__(self, url: str, admin_key: str) -> None:
        self._url = url.rstrip("/") + "/admin/weights"
        self._headers = {"Authorization": f"Bearer {admin_key}"}

    def swap(self, body: dict[str, Any]) -> dict[str, Any]:
        """Load a folder into every replica; returns the application's SwapResult."""
        return self._send("POST", timeout_s=SWAP_TIMEOUT_S, body=body)

    def rollback(self, body: dict[str, Any]) -> dict[str, Any]:
        """Bring an earlier version back on every replica; returns the application's SwapResult."""
        return self._send("POST", "/rollback", timeout_s=SWAP_TIMEOUT_S, body=body)

    def status(self) -> dict[str, Any]:
        """The committed version and each replica's report."""
        return self._send("GET", timeout_s=STATUS_TIMEOUT_S)

    def _send(
        self, method: str, path: str = "", *, timeout_s: float, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        try:
            response = httpx.request(
                method,
                self._url + path,
                json=body,
                headers=self._headers,
                timeout=timeout_s,
                trust_env=not _is_this_machine(self._url),
            )
        except httpx.TimeoutException as error:
            raise CommandFailed(f"{self._url} did not answer within {timeout_s:.0f} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CommandFailed(f"nothing answers at {self._url} ({error}); name the application with --url") from error
        if response.is_success:
            return dict(response.json())
        raise CommandFailed(f"{_reason(response)} (HTTP {response.status_code})")


def print_swap(result: dict[str, Any], *, as_json: bool) -> None:
    """One line, or the whole answer as JSON."""
    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(
        f"version {result['version']} is committed on {len(result['replicas'])} replica(s); "
        f"longest pause {1000 * result['paused_s']:.0f} ms, whole swap {result['total_s']:.1f} s"
    )


def print_status(fleet: dict[str, Any], *, as_json: bool) -> None:
    """The committed version, then a line a replica; or the whole answer as JSON."""
    if as_json:
        typer.echo(json.dumps(fleet))
        return
    committed, *earlier = fleet["history"]
    typer.echo(f"committed: {_line(committed)}")
    if fleet["swap_in_progress"]:
        typer.echo(f"swap in progress: {fleet['swap_in_progress']}")
    if fleet["problem"]:
        typer.echo(f"problem: {fleet['problem']}")
    for replica in fleet["replicas"]:
        ranks = f", {replica['num_ranks']} ranks" if replica.get("num_ranks", 1) > 1 else ""
        error = f", {replica['error']}" if replica["error"] else ""
        typer.echo(
            f"{replica['replica_id']}: version {replica['version']}, {replica['state']}, "
            f"{replica['num_running']} running, {replica['num_waiting']} waiting{ranks}{error}"
        )
    for version in earlier:
        typer.echo(f"earlier: {_line(version)}")


def _line(version: dict[str, Any]) -> str:
    """One version of the history: from where, and if known its label, when, and who."""
    source = version["source"]["path"] if version["source"] else "the model it was started with"
    parts = [f"version {version['version']}", source, version["label"], version["committed_at"]]
    return ", ".join(part for part in [*parts, version["requested_by"]] if part)


def _is_this_machine(url: str) -> bool:
    """Whether what the environment says of proxies is not meant for this address."""
    host = httpx.URL(url).host
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reason(response: httpx.Response) -> str:
    """The message of the error body, else the start of whatever was answered."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text.strip()[:200] or response.reason_phrase
