"""The admin key on this machine: made when nobody configured one, and found again by `pitstop swap` and `status`."""

import os
import secrets
from pathlib import Path

from serve_app.bearer_keys import KeySource, parse_keys
from serve_app.cli.failure import CommandFailed

KEY_FILE_NAME = "admin.key"
OWNER_ONLY = 0o600


def ensure_key_file(cache_dir: Path) -> Path:
    """The key file in cache_dir, made with a random key, readable by its owner only, if it was not there."""
    path = cache_dir / KEY_FILE_NAME
    cache_dir.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, OWNER_ONLY)
    except FileExistsError:
        path.chmod(OWNER_ONLY)
        return path
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    return path


def find_admin_key(key: str | None, key_file: Path | None, *, cache_dir: Path) -> str:
    """The configured key, else the first in the named file, else the one that `pitstop serve` made."""
    found = key or _read(key_file or cache_dir / KEY_FILE_NAME)
    if not (found.isascii() and found.isprintable()) or " " in found:
        raise CommandFailed("the admin key cannot be sent: it must be printable ASCII without spaces")
    return found


def _read(path: Path) -> str:
    try:
        keys = parse_keys(KeySource(path=str(path), has_tenants=False), what="admin key")
    except ValueError as error:
        raise CommandFailed(f"no admin key: {error}; set PITSTOP_ADMIN_KEY or PITSTOP_ADMIN_KEY_FILE") from error
    return next(iter(keys))
