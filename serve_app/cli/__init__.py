"""The command line: `pitstop serve`, the commands of an application that runs, `bench`, `doctor` and `fetch`.

Only argument parsing happens here.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.admin import (
    DEFAULT_URL,
    AdminApi,
    print_drained,
    print_ended,
    print_lease,
    print_swap,
    print_undrained,
)
from serve_app.cli.bench import bench
from serve_app.cli.doctor import doctor
from serve_app.cli.failure import CommandFailed
from serve_app.cli.key_file import find_admin_key
from serve_app.cli.launch import launch
from serve_app.cli.node_streams import wait_for_streams
from serve_app.cli.progress import progress
from serve_app.cli.serve_config import Overrides
from serve_app.cli.status import print_status
from serve_app.model_store import ModelStoreError, default_cache_dir, fetch_default_model

app = typer.Typer(
    help="Serve Hugging Face decoders on Ray Serve and change their weights while they serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PAUSE_LEASE_S = 60.0
"""Of a new pause, where nothing was said: long enough to look, and soon over where it is forgotten."""

CacheDir = Annotated[Path, typer.Option(help="Folder of converted models, logs and the made-up admin key.")]
Url = Annotated[str, typer.Option(help="Where the application listens.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
InFlight = Annotated[str, typer.Option(help="What becomes of running requests: keep, recompute, finish or abort.")]
Pinned = Annotated[str, typer.Option(help="What becomes of requests pinned to a version: finish or end.")]
FinishTimeout = Annotated[
    float | None, typer.Option("--finish-timeout", help="Seconds to wait for requests that finish first.")
]
Strategy = Annotated[str, typer.Option(help="synchronous: no two versions generate at once; or rolling.")]
MaxPaused = Annotated[int, typer.Option(min=1, help="Replicas of a rolling swap that may stand still at once.")]
OnFailure = Annotated[str, typer.Option(help="Of a replica in a rolling swap: continue or rollback.")]
Verify = Annotated[bool, typer.Option("--verify", help="Read the weights back on every replica afterwards.")]
Wait = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for a swap that is under way.")]
Key = Annotated[str | None, typer.Option(help="Sent again with the same key, the command does its work once.")]
Replicas = Annotated[list[str] | None, typer.Argument(metavar="[REPLICA]...", help="As status names them.")]
Node = Annotated[str | None, typer.Option(help="All replicas of this address, too.")]
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
    path: Annotated[Path | None, typer.Option(help="Folder of safetensors that every replica can read.")] = None,
    hub: Annotated[str | None, typer.Option(help="A model of the hub, in place of a folder.")] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit of the hub's model.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Tensors left out keep their values.")] = False,
    in_flight: InFlight = "keep",
    pinned: Pinned = "finish",
    finish_timeout_s: FinishTimeout = None,
    strategy: Strategy = "synchronous",
    max_paused: MaxPaused = 1,
    on_failure: OnFailure = "continue",
    verify: Verify = False,
    wait_s: Wait = 0.0,
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
    if (path is None) == (hub is None):
        raise CommandFailed("name the weights by either --path or --hub")
    with progress(f"swapping weights to {path or hub}"):
        result = api.swap(
            {
                "source": {"path": str(path.absolute())} if path else {"hub": hub, "revision": revision},
                "partial": partial,
                "in_flight": in_flight,
                "pinned": pinned,
                "finish_timeout_s": finish_timeout_s,
                "strategy": strategy,
                "max_paused": max_paused,
                "on_failure": on_failure,
                "verify": verify,
                "wait_s": wait_s,
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
    strategy: Strategy = "synchronous",
    max_paused: MaxPaused = 1,
    verify: Verify = False,
    wait_s: Wait = 0.0,
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
        result = api.rollback(
            {
                "version": to,
                "in_flight": in_flight,
                "strategy": strategy,
                "max_paused": max_paused,
                "verify": verify,
                "wait_s": wait_s,
                "idempotency_key": idempotency_key,
            }
        )
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
def pause(
    lease_s: Annotated[
        float | None,
        typer.Option("--lease", help="Seconds until generation goes on by itself; else 60, or as long as it was."),
    ] = None,
    renew: Annotated[str | None, typer.Option(help="A lease to prolong, in place of a new pause.")] = None,
    in_flight: Annotated[
        str | None, typer.Option(help="Running requests of a new pause: keep, or finish them first; else keep.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    admin_key: AdminKey = None,
    admin_key_file: AdminKeyFile = None,
    cache_dir: CacheDir = default_cache_dir(),  # noqa: B008
) -> None:
    """Have every replica stand still for a lease; requests wait meanwhile."""
    api = AdminApi(url, find_admin_key(admin_key, admin_key_file, cache_dir=cache_dir))
    if renew is None:
        lease = api.pause(
            {
                "lease_s": PAUSE_LEASE_S if lease_s is None else lease_s,
                "in_flight": "keep" if in_flight is None else in_flight,
            }
        )
    elif in_flight is not None:
        raise CommandFailed("--in-flight is for a new pause; leave it out with --renew")
    else:
        lease = api.renew(renew, {"lease_s": lease_s})
    print_lease(lease, as_json=as_json)


@app.command()
def resume(
    lease_id: Annotated[str | None, typer.Option("--lease-id", help="The pause to end; else all.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    admin_key: AdminKey = None,
    admin_key_file: AdminKeyFile = None,
    cache_dir: CacheDir = default_cache_dir(),  # noqa: B008
) -> None:
    """End a pause, or all of them."""
    api = AdminApi(url, find_admin_key(admin_key, admin_key_file, cache_dir=cache_dir))
    print_ended(api.resume({"lease_id": lease_id}), as_json=as_json)


@app.command()
def drain(
    replicas: Replicas = None,
    node: Node = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait until they have no requests.")
    ] = 30.0,
    replace: Annotated[bool, typer.Option("--replace", help="End them then, so that others start.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even where no other replica serves.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    admin_key: AdminKey = None,
    admin_key_file: AdminKeyFile = None,
    cache_dir: CacheDir = default_cache_dir(),  # noqa: B008
) -> None:
    """Take replicas out of service: their requests go on elsewhere. Exit status 1 where some still have requests."""
    api = AdminApi(url, find_admin_key(admin_key, admin_key_file, cache_dir=cache_dir))
    body = _replicas_meant(replicas, node) | {"timeout_s": timeout_s, "replace": replace, "force": force}
    with progress("draining"):
        result = api.drain(body)
    print_drained(result, as_json=as_json)
    if result["requests_left"]:
        raise typer.Exit(1)


@app.command()
def undrain(
    replicas: Replicas = None,
    node: Node = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    admin_key: AdminKey = None,
    admin_key_file: AdminKeyFile = None,
    cache_dir: CacheDir = default_cache_dir(),  # noqa: B008
) -> None:
    """Put drained replicas back into service."""
    api = AdminApi(url, find_admin_key(admin_key, admin_key_file, cache_dir=cache_dir))
    print_undrained(api.undrain(_replicas_meant(replicas, node)), as_json=as_json)


@app.command()
def wait_streams(
    node: Annotated[str, typer.Option(help="Address of the machine.")] = "127.0.0.1",
    metrics_port: Annotated[int, typer.Option(min=1, max=65535, help="Of Ray's metrics agent there.")] = 8080,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait at most.")] = 480.0,
) -> None:
    """Wait until router and proxy of a machine answer nobody. Exit status 1 where the time is up before."""
    host = f"[{node}]" if ":" in node else node
    with progress("waiting for streams to end"):
        left = wait_for_streams(f"http://{host}:{metrics_port}/metrics", timeout_s=timeout_s)
    typer.echo(f"{left} HTTP request(s) are still answered there" if left else "nobody is answered there")
    if left:
        raise typer.Exit(1)


def _replicas_meant(replicas: list[str] | None, node: str | None) -> dict[str, object]:
    if not replicas and node is None:
        raise CommandFailed("name replicas, as `pitstop status` shows them, or --node ADDRESS")
    return {"replica_ids": replicas or [], "node": node}


app.command()(bench)
app.command()(doctor)


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
