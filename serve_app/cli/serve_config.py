"""The Serve config file that `pitstop serve` is given, and what it makes of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from serve_app.cli.failure import CommandFailed

IMPORT_PATH = "serve_app.app:build_app"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
"""Of a file that names none. Serve's own default host for files is every interface, and the API has no user keys."""


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
        return f"http://{host}:{self.port}{prefix}"

    def unknown_key(self) -> str | None:
        """The first key that Serve does not know, dotted; it would leave it out without a word."""
        # Importing Ray takes seconds, which a refusal of the file itself need not wait for.
        from ray.serve.schema import ServeDeploySchema

        return _unknown_key(self.tree, ServeDeploySchema)

    def write(self, path: Path) -> None:
        """Render it as YAML."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(self.tree, sort_keys=False))


def read_config(path: Path, overrides: Overrides) -> ServeConfig:
    """Read the file and apply the overrides. Raises CommandFailed where it is no config of a Pitstop application."""
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CommandFailed(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    try:
        application = _find_application(tree)
        application["args"] = dict(application.get("args") or {})
        tree["http_options"] = {"host": DEFAULT_HOST, "port": DEFAULT_PORT} | (tree.get("http_options") or {})
        config = ServeConfig(tree=tree, application=application)
        _apply(overrides, config)
        if not 0 < config.port < 65536:
            raise ValueError(f"http_options.port is {config.port}; a port is 1 to 65535")
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise CommandFailed(f"{path} is no Serve config with an application of {IMPORT_PATH}: {error}") from error
    return config


def _find_application(tree: dict[str, Any]) -> dict[str, Any]:
    applications: list[dict[str, Any]] = tree["applications"]
    for application in applications:
        if application["import_path"] == IMPORT_PATH:
            return application
    raise ValueError("none of its applications has this import_path")


def _apply(overrides: Overrides, config: ServeConfig) -> None:
    if overrides.port is not None:
        config.tree["http_options"]["port"] = overrides.port
    if overrides.model is not None:
        config.args["model"] = overrides.model
    if overrides.replicas is not None:
        bounds = {"min": overrides.replicas, "max": overrides.replicas}
        config.args["replicas"] = {**(config.args.get("replicas") or {}), **bounds}


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
