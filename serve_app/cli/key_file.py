"""The admin key on this machine: made when nobody configured one, and found again by `pitstop swap` and `status`."""

import os
import secrets
from pathlib import Path

from serve_app.bearer_keys import KeySource, parse_keys
from serve_app.cli.failure import CommandFailed

KEY_FILE_NAME = "admin.key"
OWNER_ONLY = 0o600


def ensure_key_file(cache_dir: Path) -> Path:
    """The key file in cache_dir, made with a random key, readable by its owner only, if it was not there.

    Raises CommandFailed where it cannot be made, and where what is there holds no key.
    """
    path = cache_dir / KEY_FILE_NAME
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            _check_made(path)
            path.chmod(OWNER_ONLY)
        else:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, OWNER_ONLY)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
    except OSError as error:
        raise CommandFailed(
            f"the admin key cannot be kept in {path}: {error.strerror}; name another folder with --cache-dir, or set"
            " PITSTOP_ADMIN_KEY"
        ) from error
    return path


def _check_made(path: Path) -> None:
    try:
        parse_keys(KeySource(path=str(path), has_tenants=False), what="admin key")
    except ValueError as error:
        raise CommandFailed(f"{error}; remove {path} to have another made") from error


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
