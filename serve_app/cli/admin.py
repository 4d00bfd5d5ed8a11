"""`pitstop swap`, `rollback`, `status`, `pause` and `resume`: the admin routes over HTTP."""

import json
from ipaddress import ip_address
from typing import Any
from urllib.parse import quote

import httpx
import typer

from serve_app.cli.failure import CommandFailed

DEFAULT_URL = "http://127.0.0.1:8000"
STATUS_TIMEOUT_S = 10.0
SWAP_TIMEOUT_S = 3600.0
"""Above the application's own deadlines for each phase, so that its answer arrives."""


RESULT_LINES = {
    "lagging": "not there yet, and out of routing until they are",
    "replaced": "failed, and being replaced",
    "verified": "read back and verified",
    "unchanged": "tensors left as they were",
}
"""Lists of a SwapResult that are shown where they are not empty."""


class AdminApi:
    """The admin routes of one application; every failure is a CommandFailed."""

    def __init__(self, url: str, admin_key: str) -> None:
        self._url = check_url(url) + "/admin"
        self._headers = {"Authorization": f"Bearer {admin_key}"}

    def swap(self, body: dict[str, Any]) -> dict[str, Any]:
        """Load a folder into every replica; returns the application's SwapResult."""
        return self._send("POST", "/weights", gives="version", timeout_s=SWAP_TIMEOUT_S, body=body)

    def rollback(self, body: dict[str, Any]) -> dict[str, Any]:
        """Bring an earlier version back on every replica; returns the application's SwapResult."""
        return self._send("POST", "/weights/rollback", gives="version", timeout_s=SWAP_TIMEOUT_S, body=body)

    def status(self) -> dict[str, Any]:
        """The committed version and each replica's report."""
        return self._send("GET", "/weights", gives="committed", timeout_s=STATUS_TIMEOUT_S)

    def pause(self, body: dict[str, Any]) -> dict[str, Any]:
        """Have every replica stand still; returns the application's PauseLease."""
        return self._send("POST", "/pause", gives="lease_id", timeout_s=SWAP_TIMEOUT_S, body=body)

    def renew(self, lease_id: str, body: dict[str, Any]) -> dict[str, Any]:
        """Put the end of a pause off; returns the application's PauseLease."""
        return self._send(
            "POST", f"/pause/{quote(lease_id, safe='')}/renew", gives="lease_id", timeout_s=SWAP_TIMEOUT_S, body=body
        )

    def resume(self, body: dict[str, Any]) -> list[str]:
        """End one pause or all; returns their leases."""
        return list(self._send("POST", "/resume", gives="ended", timeout_s=SWAP_TIMEOUT_S, body=body)["ended"])

    def drain(self, body: dict[str, Any]) -> dict[str, Any]:
        """Take replicas out of service; returns the application's DrainResult."""
        return self._send("POST", "/drain", gives="requests_left", timeout_s=SWAP_TIMEOUT_S, body=body)

    def undrain(self, body: dict[str, Any]) -> dict[str, Any]:
        """Put drained replicas back; returns the application's DrainResult."""
        return self._send("POST", "/undrain", gives="replicas", timeout_s=SWAP_TIMEOUT_S, body=body)

    def _send(
        self, method: str, path: str, *, gives: str, timeout_s: float, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """gives: what the application's answer has; something else may listen where it is looked for."""
        url = self._url + path
        try:
            response = httpx.request(
                method,
                url,
                json=body,
                headers=self._headers,
                timeout=timeout_s,
                trust_env=not is_this_machine(self._url),
            )
        except httpx.TimeoutException as error:
            raise CommandFailed(f"{url} did not answer within {timeout_s:.0f} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CommandFailed(f"nothing answers at {url} ({error}); name the application with --url") from error
        except ValueError as error:
            raise CommandFailed(f"what was asked for cannot be sent: {error}") from error
        if not response.is_success:
            raise CommandFailed(f"{_reason(response)} (HTTP {response.status_code})")
        answer = _json(response)
        if not isinstance(answer, dict) or gives not in answer:
            raise CommandFailed(
                f"{url} answers with {response.text[:60]!r}, which is not Pitstop's; name the application with --url"
            )
        return answer


def print_swap(result: dict[str, Any], *, as_json: bool) -> None:
    """One line, or the whole answer as JSON."""
    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(
        f"version {result['version']} is committed on {len(result['replicas'])} replica(s); "
        f"longest pause {1000 * result['paused_s']:.0f} ms, whole swap {result['total_s']:.1f} s"
    )
    for name, text in RESULT_LINES.items():
        if result.get(name):
            typer.echo(f"{text}: {', '.join(result[name])}")


def print_lease(lease: dict[str, Any], *, as_json: bool) -> None:
    """One line, or the whole answer as JSON."""
    if as_json:
        typer.echo(json.dumps(lease))
        return
    typer.echo(f"{len(lease['replicas'])} replica(s) stand still for {lease['lease_s']:g} s: lease {lease['lease_id']}")


def print_ended(lease_ids: list[str], *, as_json: bool) -> None:
    """One line, or the leases as JSON."""
    typer.echo(json.dumps(lease_ids) if as_json else f"ended {len(lease_ids)} pause(s)")


def print_drained(result: dict[str, Any], *, as_json: bool) -> None:
    """One line, and one for each replica that still has requests; or the whole answer as JSON."""
    if as_json:
        typer.echo(json.dumps(result))
        return
    left = result["requests_left"]
    empty = [name for name in result["replicas"] if name not in left]
    what = "drained and being replaced" if result["is_replaced"] else "drained"
    typer.echo(f"{what}: {', '.join(empty) or 'none'}")
    for name, number in left.items():
        typer.echo(f"{name} takes no new requests and still has {number}")


def print_undrained(result: dict[str, Any], *, as_json: bool) -> None:
    """One line, or the whole answer as JSON."""
    typer.echo(json.dumps(result) if as_json else f"back in service: {', '.join(result['replicas'])}")


def check_url(url: str) -> str:
    """The URL without a slash at its end. Raises CommandFailed where nothing could be asked below it."""
    try:
        parsed = httpx.URL(url)
        is_right = parsed.scheme in ("http", "https") and bool(parsed.host) and 0 < (parsed.port or 80) < 65536
    except httpx.InvalidURL:
        is_right = False
    if not is_right:
        raise CommandFailed(f"--url is {url!r}; it must be http:// or https:// with a host, such as {DEFAULT_URL}")
    return url.rstrip("/")


def is_this_machine(url: str) -> bool:
    """Whether what the environment says of proxies is not meant for this address."""
    host = httpx.URL(url).host
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _json(response: httpx.Response) -> object:
    """What was answered; None where it is no JSON."""
    try:
        return response.json()
    except ValueError:
        return None


def _reason(response: httpx.Response) -> str:
    """The message of the error body, else the start of whatever was answered."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text.strip()[:200] or response.reason_phrase
