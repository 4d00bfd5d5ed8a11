"""What is refused of a swap before anything is done for it, by name."""

import math
from numbers import Real
from pathlib import PurePath
from typing import TypeGuard

from engine import InvalidRequest, SwapConflict
from serve_app.messages import (
    MAX_WAIT_S,
    DrainRequest,
    PauseRequest,
    Probes,
    RollbackRequest,
    SwapOptions,
    SwapRequest,
    WeightSource,
)
from serve_app.protocol.parsing import shorten

MAX_LABEL_LENGTH = 1024
"""Characters of a label and of an idempotency key, which the history keeps."""
MAX_LAYERS = 64
"""Folders that one version may lie in: every replica that starts reads all of them."""
MAX_PROBES = 64
MAX_PROBE_LENGTH = 4096
"""Probes run while staging, beside generation; they are for a look and not for a benchmark."""
MIN_LEASE_S = 1.0
"""The fleet has to be told and stand still within it; as the shortest of a swap session."""
MAX_LEASE_S = 3600.0
"""A trainer that is gone must not keep a fleet still for longer."""
CHOICES = {
    "in_flight": ("keep", "recompute", "finish", "abort"),
    "pinned": ("finish", "end"),
    "strategy": ("synchronous", "rolling"),
    "on_failure": ("continue", "rollback"),
}
PAUSE_CHOICES = ("keep", "finish")


def check_swap(request: SwapRequest) -> None:
    """Raises InvalidRequest for what came over a handle, where nobody has checked it."""
    check_how(request)
    source = request.source
    if not isinstance(source, WeightSource):
        raise InvalidRequest(f"source is {shorten(source)}; it must be a WeightSource", "source")
    _check_text(path=source.path, hub=source.hub, revision=source.revision)
    if source.hub is None and not source.folders:
        raise InvalidRequest("source names no folder; give one", "source")
    if len(source.layers) > MAX_LAYERS:
        raise InvalidRequest(f"source has {len(source.layers)} layers; at most {MAX_LAYERS} are read", "source")
    for folder in source.folders:
        _check_text(path=folder)
        if not PurePath(folder).is_absolute():
            raise InvalidRequest(f"path is {folder!r}; it must be absolute, as replicas run in other folders", "path")


def check_how(request: SwapRequest) -> None:
    """Raises InvalidRequest for what a swap asks for beside its source."""
    check_options(request)
    _check_text(label=request.label)
    _check_flags(partial=request.partial, cast=request.cast)
    if request.base_version is not None and type(request.base_version) is not int:
        raise InvalidRequest(f"base_version is {shorten(request.base_version)}; it must be an integer", "base_version")
    if request.probes is not None:
        _check_probes(request.probes)


def check_base(base_version: int | None, newest: int) -> None:
    """Raises SwapConflict where weights that were made for one version would go over another."""
    if base_version not in (None, newest):
        raise SwapConflict(
            f"version {newest} is committed, and these weights were made as changes to version {base_version}; "
            "begin again"
        )


def check_rollback(request: RollbackRequest) -> None:
    """Raises InvalidRequest."""
    check_options(request)
    if request.version is not None and type(request.version) is not int:
        raise InvalidRequest(f"version is {request.version!r}; it must be an integer", "version")


def check_options(options: SwapOptions) -> None:
    """Raises InvalidRequest."""
    _check_text(idempotency_key=options.idempotency_key)
    for name, choices in CHOICES.items():
        value = getattr(options, name)
        if value not in choices:
            raise InvalidRequest(f"{name} is {value!r}; it must be one of {', '.join(choices)}", name)
    _check_flags(verify=options.verify)
    if type(options.max_paused) is not int or options.max_paused < 1:
        raise InvalidRequest(
            f"max_paused is {shorten(options.max_paused)}; it must be an integer, at least 1", "max_paused"
        )
    if options.strategy != "rolling" and (options.max_paused, options.on_failure) != (1, "continue"):
        raise InvalidRequest("max_paused and on_failure are for strategy 'rolling' alone", "strategy")
    finish_s = options.finish_timeout_s
    if finish_s is not None and not (_is_number(finish_s) and 0 < finish_s <= MAX_WAIT_S):
        raise InvalidRequest(
            f"finish_timeout_s is {shorten(finish_s)}; it must be above 0 and at most {MAX_WAIT_S:g}",
            "finish_timeout_s",
        )
    _check_seconds(0.0, MAX_WAIT_S, wait_s=options.wait_s)


def check_pause(request: PauseRequest) -> None:
    """Raises InvalidRequest."""
    check_lease(request.lease_s)
    if request.in_flight not in PAUSE_CHOICES:
        raise InvalidRequest(
            f"in_flight is {request.in_flight!r}; it must be one of {', '.join(PAUSE_CHOICES)}", "in_flight"
        )


def check_lease(lease_s: float) -> None:
    """Raises InvalidRequest."""
    _check_seconds(MIN_LEASE_S, MAX_LEASE_S, lease_s=lease_s)


def check_drain(request: DrainRequest) -> None:
    """Raises InvalidRequest."""
    _check_seconds(0.0, MAX_WAIT_S, timeout_s=request.timeout_s)


def _check_flags(**flags: object) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InvalidRequest(f"{name} is {shorten(flag)}; it must be true or false", name)


def _check_seconds(least: float, most: float, **times: object) -> None:
    for name, seconds in times.items():
        if not _is_number(seconds) or not least <= seconds <= most:
            raise InvalidRequest(f"{name} is {shorten(seconds)}; it must be {least:g} to {most:g} seconds", name)


def _check_probes(probes: Probes) -> None:
    if not isinstance(probes, Probes):
        raise InvalidRequest(f"probes is {shorten(probes)}; it must be Probes", "probes")
    lengths = [len(prompt) for prompt in probes.prompts]
    if not 1 <= len(lengths) <= MAX_PROBES:
        raise InvalidRequest(f"probes has {len(lengths)} prompts; give 1 to {MAX_PROBES}", "probes")
    if not all(2 <= length <= MAX_PROBE_LENGTH for length in lengths):
        raise InvalidRequest(
            f"probes has a prompt of {min(lengths)} to {max(lengths)} ids; each needs 2 to {MAX_PROBE_LENGTH}", "probes"
        )
    if not (_is_number(probes.max_abs_difference) and 0 <= probes.max_abs_difference < math.inf):
        raise InvalidRequest(
            f"probes.max_abs_difference is {shorten(probes.max_abs_difference)}; it must be a finite number, 0 or more",
            "probes",
        )
    if probes.reference is None:
        return
    if [len(row) for row in probes.reference] != [length - 1 for length in lengths]:
        raise InvalidRequest(
            "probes.reference does not fit its prompts; give one log-probability for each id after the first", "probes"
        )
    for number, row in enumerate(probes.reference):
        for value in row:
            # No difference from one that is not finite is too large, so such a check would pass whatever it finds.
            if not _is_number(value) or not math.isfinite(value):
                raise InvalidRequest(
                    f"probes.reference has {shorten(value)} for probe {number}; it must hold finite numbers", "probes"
                )


def _is_number(value: object) -> TypeGuard[float]:
    """Gives whether a value is a number, of numpy too; over a handle anything may come."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_text(**texts: object) -> None:
    """Raises InvalidRequest for what the manifest could not hold."""
    for name, text in texts.items():
        if text is None:
            continue
        if not isinstance(text, str):
            raise InvalidRequest(f"{name} is {text!r}; it must be text", name)
        if name != "path" and len(text) > MAX_LABEL_LENGTH:
            raise InvalidRequest(f"{name} has {len(text)} characters; at most {MAX_LABEL_LENGTH} are kept", name)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{name} is {text!r}, which has half a surrogate pair; use another", name) from None
