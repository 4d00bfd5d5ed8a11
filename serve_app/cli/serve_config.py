"""The Serve config file that `pitstop serve` is given, and what it makes of it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from serve_app.cli.failure import CommandFailed

IMPORT_PATH = "serve_app.app:build_app"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
"""Of a file that names none. Serve's own default host for files is every interface, and the API has no user keys."""

ROUTE_PREFIX = re.compile(r"/|(/[^/{}]+)+")
"""What Serve takes; with none at all nobody would reach the application."""
EXAMPLE = "configs/local.yaml shows one"
SHOWN_CHARACTERS = 80
"""Of a value in a refusal, which stays one line of a terminal or two."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line changes in the file. None leaves it; replicas sets both bounds of autoscaling."""

    port: int | None = None
    model: str | None = None
    replicas: int | None = None


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A config file as a tree. `application` and its `args` are parts of the tree, not copies."""

    tree: dict[str, Any]
    application: dict[str, Any]

    @property
    def args(self) -> dict[str, Any]:
        """What the application is built with."""
        args: dict[str, Any] = self.application["args"]
        return args

    @property
    def host(self) -> str:
        """The address to bind."""
        return str(self.tree["http_options"]["host"])

    @property
    def port(self) -> int:
        """The port to bind."""
        return int(self.tree["http_options"]["port"])

    @property
    def name(self) -> str:
        """The name of the application."""
        return str(self.application.get("name", "default"))

    @property
    def url(self) -> str:
        """Where a client on this machine reaches the application."""
        host = DEFAULT_HOST if self.host in ("0.0.0.0", "::") else self.host
        prefix = str(self.application.get("route_prefix") or "/").rstrip("/")
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}{prefix}"

    def unknown_key(self) -> str | None:
        """The first key that Serve does not know, dotted; it would leave it out without a word."""
        # Importing Ray takes seconds, which a refusal of the file itself need not wait for.
        from ray.serve.schema import ServeDeploySchema

        return _unknown_key(self.tree, ServeDeploySchema)

    def problem(self) -> str | None:
        """What Serve would refuse, or leave out without a word, as one sentence; None where it takes the whole."""
        from ray.serve.schema import ServeDeploySchema

        if (unknown := self.unknown_key()) is not None:
            return f"{unknown} is not a key of a Serve config; remove or correct it"
        if (wrong := _wrong_deployment(self.tree)) is not None:
            return wrong
        try:
            ServeDeploySchema.model_validate(self.tree)
        except ValidationError as error:
            return "; ".join(_describe(problem) for problem in error.errors(include_url=False))
        return None

    def write(self, path: Path) -> None:
        """Render it as YAML."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(self.tree, sort_keys=False))


def read_config(path: Path, overrides: Overrides) -> ServeConfig:
    """Read the file and apply the overrides. Raises CommandFailed where it is no config of a Pitstop application."""
    tree = _load(path)
    try:
        application = _find_application(tree)
        application["args"] = dict(_mapping(application, "args", "a mapping of settings"))
        tree["http_options"] = {"host": DEFAULT_HOST, "port": DEFAULT_PORT} | _mapping(
            tree, "http_options", "a mapping with host and port"
        )
        config = ServeConfig(tree=tree, application=application)
        _apply(overrides, config)
        _check_place(config)
    except ValueError as error:
        raise CommandFailed(f"{path} is no Serve config with an application of {IMPORT_PATH}: {error}") from error
    return config


def _load(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise CommandFailed(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise CommandFailed(f"{path} is nested too deeply for a config; {EXAMPLE}") from error
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        # No text, or a value that does not fit its tag, such as a month 13, which PyYAML leaves to Python.
        raise CommandFailed(f"{path} is not YAML: a value in it cannot be read ({error})") from error


def _find_application(tree: Any) -> dict[str, Any]:
    if not isinstance(tree, dict):
        what = "is empty" if tree is None else f"holds {_shown(tree)}"
        raise ValueError(f"it {what}; it must be a mapping with applications in it; {EXAMPLE}")
    if tree.get("applications") is None:
        raise ValueError(f"applications is missing; {EXAMPLE}")
    applications = tree["applications"]
    if not isinstance(applications, list):
        raise ValueError(f"applications is {_shown(applications)}; it must be a list; {EXAMPLE}")
    for index, application in enumerate(applications):
        if not isinstance(application, dict):
            raise ValueError(f"applications.{index} is {_shown(application)}; it must be a mapping; {EXAMPLE}")
        if application.get("import_path") == IMPORT_PATH:
            return application
    found = [_shown(application.get("import_path")) for application in applications]
    raise ValueError(f"none of its applications has this import_path; they have {', '.join(found) or 'none'}")


def _check_place(config: ServeConfig) -> None:
    """Raises ValueError where it could not be said where the application listens."""
    options, application = config.tree["http_options"], config.application
    host, port, name = options["host"], options["port"], application.get("name", "default")
    if not (isinstance(host, str) and host):
        raise ValueError(f"http_options.host is {_shown(host)}; it must be a name or an address, such as 127.0.0.1")
    is_number = type(port) is int or (isinstance(port, str) and port.isascii() and port.isdecimal())
    if not is_number or not 0 < int(port) < 65536:
        raise ValueError(f"http_options.port is {_shown(port)}; a port is 1 to 65535")
    if not (isinstance(name, str) and name):
        raise ValueError(f"name is {_shown(name)}; it must be a text, such as pitstop")
    prefix = application.get("route_prefix", "/")
    if not isinstance(prefix, str) or ROUTE_PREFIX.fullmatch(prefix) is None:
        raise ValueError(
            f"route_prefix is {_shown(prefix)}; it must be / or begin with one, and end in none and hold no braces"
        )


def _mapping(parent: dict[str, Any], key: str, kind: str) -> dict[str, Any]:
    """Gives a part of the tree, empty where it is left out. Raises ValueError where it is something else."""
    value = parent.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{key} is {_shown(value)}; it must be {kind}")
    return value or {}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _apply(overrides: Overrides, config: ServeConfig) -> None:
    if overrides.port is not None:
        config.tree["http_options"]["port"] = overrides.port
    if overrides.model is not None:
        config.args["model"] = overrides.model
    if overrides.replicas is not None:
        bounds = {"min": overrides.replicas, "max": overrides.replicas}
        config.args["replicas"] = _mapping(config.args, "replicas", "a mapping with min and max") | bounds


def _wrong_deployment(tree: dict[str, Any]) -> str | None:
    """Which entry is no mapping; Serve's own checks take every one for that."""
    for index, application in enumerate(tree["applications"]):
        deployments = application.get("deployments") if isinstance(application, dict) else None
        for number, deployment in enumerate(deployments if isinstance(deployments, list) else ()):
            if not isinstance(deployment, dict):
                return f"applications.{index}.deployments.{number} is {_shown(deployment)}; it must be a mapping"
    return None


def _describe(problem: Any) -> str:
    if problem["type"] == "model_type":
        return f"{'.'.join(map(str, problem['loc']))} is {_shown(problem['input'])}; it must be a mapping"
    message = " ".join(problem["msg"].removeprefix("Value error, ").split())
    place = ".".join(str(part) for part in problem["loc"])
    return f"{place} is {_shown(problem['input'])}; {message[0].lower()}{message[1:]}" if place else message


def _unknown_key(values: Any, schema: type[BaseModel]) -> str | None:
    """Values that are no mapping are left to Serve, which refuses them."""
    for key, value in values.items() if isinstance(values, dict) else ():
        if key not in schema.model_fields:
            return str(key)
        inner = _inner_schema(schema.model_fields[key].annotation)
        if inner is None:
            continue
        for item in value if isinstance(value, list) else [value]:
            if (unknown := _unknown_key(item, inner)) is not None:
                return f"{key}.{unknown}"
    return None


def _inner_schema(annotation: Any) -> type[BaseModel] | None:
    """The one schema of a field, alone, optional or in a list; None where a free mapping is allowed, too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    parts = [part for part in get_args(annotation) if part is not type(None)]
    return _inner_schema(parts[0]) if len(parts) == 1 else None
