"""The command line: `pitstop serve | swap | rollback | status | fetch`. Only argument parsing happens here."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.admin import DEFAULT_URL, AdminApi, print_status, print_swap
from serve_app.cli.failure import CommandFailed
from serve_app.cli.key_file import find_admin_key
from serve_app.cli.launch import launch
from serve_app.cli.progress import progress
from serve_app.cli.serve_config import Overrides
from serve_app.model_store import ModelStoreError, default_cache_dir, fetch_default_model

app = typer.Typer(
    help="Serve Hugging Face decoders on Ray Serve and change their weights while they serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

CacheDir = Annotated[Path, typer.Option(help="Folder of converted models, logs and the made-up admin key.")]
Url = Annotated[str, typer.Option(help="Where the application listens.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
InFlight = Annotated[str, typer.Option(help="What becomes of running requests: keep, recompute or abort.")]
Key = Annotated[str | None, typer.Option(help="Sent again with the same key, the command does its work once.")]
# Taken from the environment only: a key on the command line could be read by every user of the machine.
AdminKey = Annotated[str | None, typer.Option(envvar="PITSTOP_ADMIN_KEY", show_envvar=False, hidden=True)]
AdminKeyFile = Annotated[
    Path | None,
    typer.Option(envvar="PITSTOP_ADMIN_KEY_FILE", help="File holding the admin key; else PITSTOP_ADMIN_KEY is used."),
]


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="A Serve config file, such as configs/local.yaml.")],
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the HTTP API.")] = None,
    model: Annotated[str | None, typer.Option(help="Local folder, hub id, or the default model's name.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Exactly so many replicas: no autoscaling.")] = None,
    cache_dir: CacheDir = default_cache_dir(),  # noqa: B008  # typer's way to show a default
) -> None:
    """Serve a model on this machine until Ctrl-C."""
    launch(config, Overrides(port=port, model=model, replicas=replicas), cache_dir=cache_dir)


@app.command()
def swap(
    path: Annotated[Path, typer.Option(help="Folder of safetensors that every replica can read.")],
    in_flight: InFlight = "keep",
    cast: Annotated[bool, typer.Option(help="Convert tensors of another dtype instead of refusing them.")] = False,
    label: Annotated[str | None, typer.Option(help="A name for people, shown by status.")] = None,
    idempotency_key: Key = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    admin_key: AdminKey = None,
    admin_key_file: AdminKeyFile = None,
    cache_dir: CacheDir = default_cache_dir(),  # noqa: B008
) -> None:
    """Load new weights into every replica while requests run."""
    api = AdminApi(url, find_admin_key(admin_key, admin_key_file, cache_dir=cache_dir))
    with progress(f"swapping weights to {path}"):
        result = api.swap(
            {
                "source": {"path": str(path.absolute())},
                "in_flight": in_flight,
                "cast": cast,
                "label": label,
                "idempotency_key": idempotency_key,
            }
        )
    print_swap(result, as_json=as_json)


@app.command()
def rollback(
    to: Annotated[
        int | None, typer.Option(min=1, help="A version of the history; else the one before the committed.")
    ] = None,
    in_flight: InFlight = "keep",
    idempotency_key: Key = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    admin_key: AdminKey = None,
    admin_key_file: AdminKeyFile = None,
    cache_dir: CacheDir = default_cache_dir(),  # noqa: B008
) -> None:
    """Bring the weights of an earlier version back, under a new number, while requests run."""
    api = AdminApi(url, find_admin_key(admin_key, admin_key_file, cache_dir=cache_dir))
    with progress("rolling weights back"):
        result = api.rollback({"version": to, "in_flight": in_flight, "idempotency_key": idempotency_key})
    print_swap(result, as_json=as_json)


@app.command()
def status(
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    admin_key: AdminKey = None,
    admin_key_file: AdminKeyFile = None,
    cache_dir: CacheDir = default_cache_dir(),  # noqa: B008
) -> None:
    """Show the committed weight version, every replica's, and the versions before."""
    api = AdminApi(url, find_admin_key(admin_key, admin_key_file, cache_dir=cache_dir))
    print_status(api.status(), as_json=as_json)


@app.command()
def fetch(cache_dir: CacheDir = default_cache_dir()) -> None:  # noqa: B008
    """Download the default model and convert it, unless that is done already."""
    try:
        with progress("looking for the default model") as report:
            folder = fetch_default_model(cache_dir=cache_dir, report=report)
    except OSError as error:
        raise CommandFailed(f"the default model cannot be stored in {cache_dir}: {error}") from error
    typer.echo(folder)


def main() -> None:
    """Run the command line; what the user can mend ends in one sentence on stderr and exit status 1."""
    try:
        app()
    except (CommandFailed, ModelStoreError) as failure:
        typer.echo(f"pitstop: {failure}", err=True)
        sys.exit(1)
