"""Bearer keys as text or a file holds them, for the application and for the command line. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path

MIN_KEY_LENGTH = 16
"""Characters; shorter keys can be guessed over the network."""


@dataclass(frozen=True, slots=True)
class KeySource:
    """Keys as text, or the file that holds them; neither where none are configured."""

    text: str = ""
    path: str | None = None
    has_tenants: bool = True

    @property
    def is_set(self) -> bool:
        return bool(self.text) or self.path is not None


def parse_keys(source: KeySource, *, what: str) -> dict[str, str | None]:
    """Gives the tenants of keys, by key: one in a line, behind a blank its tenant; a line that begins with # is none.

    Raises ValueError for a file that cannot be read or holds no key, and for a key that is at fault.
    """
    text = source.text or ("" if source.path is None else _read_text(source.path, what))
    lines = [line.strip() for line in text.splitlines()]
    keys: dict[str, str | None] = {}
    place = source.path or "the environment"
    for line in lines:
        if line and not line.startswith("#"):
            key, _, tenant = line.partition(" ") if source.has_tenants else (line, "", "")
            keys[_checked_key(key, f"{what} in {place}")] = tenant.strip() or None
    if source.is_set and not keys:
        raise ValueError(f"there is no {what} in {place}")
    return keys


def _read_text(path: str, what: str) -> str:
    try:
        return Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        # A RuntimeError is of a home folder that is not known.
        reason = "it is not text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", error)
        raise ValueError(f"the {what} file {path} cannot be read: {reason}") from None


def _checked_key(key: str, what: str) -> str:
    if len(key) < MIN_KEY_LENGTH:
        raise ValueError(f"the {what} has {len(key)} characters; use at least {MIN_KEY_LENGTH}")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError(f"the {what} must be printable ASCII without spaces, as a header has to carry it")
    return key
