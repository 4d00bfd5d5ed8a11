"""Who may ask: bearer keys, known by their hashes, from a file that may change while the router runs."""

import hashlib
import hmac
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.bearer_keys import KeySource, parse_keys
from serve_app.protocol.errors import Unauthorized, error_body, rule_of
from serve_app.router.edge import path_of

logger = logging.getLogger("ray.serve.pitstop")

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics"})
"""For probes, Prometheus and the page of the pit wall, which holds no data; they bring no key."""
ADMIN_PATHS = "/admin/"
"""These ask for a key of their own."""
ID_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. owner tells callers apart; tenant is what the file of keys says, if anything."""

    owner: str = ""
    tenant: str | None = None


ANYBODY = Caller()
"""Where no keys are set."""


class KeyRing:
    """The keys of one kind. A file is read again when it changes; one at fault then leaves the keys as they were."""

    def __init__(self, source: KeySource, *, what: str) -> None:
        """Raises ValueError for keys at fault. what: how messages call these keys."""
        self._source = source
        self._what = what
        self._signature = _signature(source.path)
        self._callers = _callers(parse_keys(source, what=what))

    @property
    def is_set(self) -> bool:
        """True where keys are configured; without them everybody may ask."""
        return self._source.is_set

    def find(self, authorization: str) -> Caller:
        """Gives whose key an Authorization header brings; raises Unauthorized."""
        self._refresh()
        scheme, _, given = authorization.partition(" ")
        digest, found = _digest(given.strip()), None
        # All are compared, whatever was found: hashes have one length, so the time tells nothing about a key.
        for known, caller in self._callers:
            if hmac.compare_digest(digest, known):
                found = caller
        if scheme.lower() != "bearer" or found is None:
            raise Unauthorized(f"the {self._what} is missing or wrong; send it as: Authorization: Bearer KEY")
        return found

    def _refresh(self) -> None:
        signature = _signature(self._source.path)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._callers = _callers(parse_keys(self._source, what=self._what))
            logger.info("event=keys_read kind=%r count=%d", self._what, len(self._callers))
        except ValueError as error:
            logger.warning("event=keys_unchanged kind=%r error=%r", self._what, str(error))


class KeyGate:
    """ASGI middleware: without a key nobody gets past it, but to the open paths and to those of the admin key."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys.is_set:
            path = path_of(scope)
            if path not in OPEN_PATHS and not path.startswith(ADMIN_PATHS):
                try:
                    caller = self._keys.find(Request(scope).headers.get("authorization", ""))
                except Unauthorized as error:
                    headers = {"www-authenticate": "Bearer"}
                    refusal = JSONResponse(error_body(error).model_dump(), rule_of(error).status, headers)
                    await refusal(scope, receive, send)
                    return
                scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Gives who sent a request that came through the gate."""
    caller = getattr(request.state, "caller", ANYBODY)
    assert isinstance(caller, Caller)
    return caller


def _callers(keys: dict[str, str | None]) -> list[tuple[bytes, Caller]]:
    digests = [(_digest(key), tenant) for key, tenant in keys.items()]
    return [(digest, Caller(tenant or digest.hex()[:ID_DIGITS], tenant)) for digest, tenant in digests]


def _signature(path: str | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    try:
        found = os.stat(Path(path).expanduser())  # noqa: PTH116  # asked for at each request
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(key: str) -> bytes:
    # Header values reach us decoded as latin-1; encoding them back gives the bytes the client sent.
    try:
        return hashlib.sha256(key.encode("latin-1")).digest()
    except UnicodeEncodeError:
        return hashlib.sha256(key.encode()).digest()
