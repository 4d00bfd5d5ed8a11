"""Waiting for an application that `serve run` has been asked for: until it is ready, or known to have failed.

Serve's command does not notice a failed deployment, so its REST interface is asked, at the address in its log.
"""

import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from serve_app.cli.failure import CommandFailed
from serve_app.cli.serve_config import ServeConfig

DEADLINE_S = 1800.0
"""A large model from a slow disk takes many minutes; Serve itself would wait for ever."""
POLL_S = 0.5
REQUEST_TIMEOUT_S = 2.0
DASHBOARD_ADDRESS = re.compile(r"dashboard at\D*?(http://[\w.:-]+)")
TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
FAILED_STATUSES = frozenset({"DEPLOY_FAILED", "UNHEALTHY"})
FAILED_REPLICA = "failed to start"
"""In a deployment's message. Serve tries again; on one machine the second try ends like the first."""
RAY_TOKEN_FILE = Path(".ray") / "auth_token"
"""Below the home folder: where Ray keeps the token of local clusters."""
TAIL_LINES = 5


@dataclass(frozen=True, slots=True)
class Startup:
    """One start of the application: the child that runs it, its log, and the configuration it was given."""

    child: subprocess.Popen[bytes]
    log_file: Path
    config: ServeConfig

    def wait(self, report: Callable[[str], None]) -> None:
        """Return once `/ready` answers 200. Raises CommandFailed with the reason as soon as it is known."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if self.child.poll() is not None:
                raise CommandFailed(f"Ray Serve ended while starting: {self.last_lines()}")
            if self._is_ready():
                return
            self._check_status(report)
            time.sleep(POLL_S)
        raise CommandFailed(f"not ready after {DEADLINE_S:.0f} s; see {self.log_file}")

    def last_lines(self) -> str:
        """The end of the log, in one line, with the place of the rest; of a traceback the line that names the error."""
        log = self._log()
        if "Traceback (most recent call last)" in log:
            return f"{_last_line(log)} (log: {self.log_file})"
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        return " | ".join(lines[-TAIL_LINES:]) + f" (log: {self.log_file})"

    def _is_ready(self) -> bool:
        try:
            return _get(f"{self.config.url}/ready").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _check_status(self, report: Callable[[str], None]) -> None:
        application = self._application()
        if application is None:
            report("starting Ray and Serve")
            return
        reason = failure_in(application)
        if reason is not None:
            raise CommandFailed(f"the application failed to start: {reason} (log: {self.log_file})")
        report("loading the model" if application["deployments"] else "building the application")

    def _application(self) -> dict[str, Any] | None:
        """What Serve says of the application, or None while it says nothing."""
        address = DASHBOARD_ADDRESS.search(self._log())
        if address is None:
            return None
        try:
            response = _get(f"{address.group(1)}/api/serve/applications/", headers=_ray_credentials())
            found: dict[str, Any] | None = response.json()["applications"].get(self.config.name)
        except (httpx.HTTPError, ValueError, KeyError):
            return None
        return found

    def _log(self) -> str:
        return TERMINAL_CODES.sub("", self.log_file.read_text(errors="replace"))


def failure_in(application: dict[str, Any]) -> str | None:
    """Why an application of Serve's REST interface has failed, as one line; None where it has not."""
    for name, deployment in application["deployments"].items():
        if FAILED_REPLICA in deployment["message"] or deployment["status"] in FAILED_STATUSES:
            return f"{name}: {_last_line(deployment['message'])}"
    if application["status"] in FAILED_STATUSES:
        return _last_line(application["message"])
    return None


def _last_line(traceback: str) -> str:
    """The line of a traceback that names the error; it is the last one."""
    lines = [line.strip() for line in TERMINAL_CODES.sub("", traceback).splitlines() if line.strip()]
    return lines[-1] if lines else "Serve gave no reason"


def _get(url: str, *, headers: Mapping[str, str] | None = None) -> httpx.Response:
    # What the environment says of proxies is not meant for this machine's own addresses.
    return httpx.get(url, headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=False)


def _ray_credentials() -> dict[str, str]:
    try:
        return {"Authorization": f"Bearer {(Path.home() / RAY_TOKEN_FILE).read_text().strip()}"}
    except OSError:
        return {}
