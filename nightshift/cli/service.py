"""The commands of the job service, as the command line declares them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nightshift.cli import completion
from nightshift.cli.output import command

_JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")]
_Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value…]", help="Values in place of the file's.", autocompletion=completion.overrides),
]
_Job = Annotated[
    str, typer.Argument(metavar="JOB", help="A job's id, or the beginning of it.", autocompletion=completion.jobs)
]
_Url = Annotated[
    str | None,
    typer.Option("--url", help="The service; left out: this machine's own.", envvar="NIGHTSHIFT_URL"),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def up(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8700,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of gRPC's JobService; left out: none.")
    ] = None,
    data_dir: Annotated[Path, typer.Option(help="Database, runs and uploads.", envvar="NIGHTSHIFT_DATA_DIR")] = Path(
        "~/.local/state/nightshift"
    ),
    at_once: Annotated[int, typer.Option(min=0, help="Most jobs that run at one time.")] = 1,
    allow_path: Annotated[
        list[Path] | None, typer.Option(help="A folder of this machine whose files jobs may name; repeat it.")
    ] = None,
    fleets: Annotated[
        Path | None, typer.Option(help="A file of rollout servers that are lent to jobs: docs/service.md.")
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Serve without tokens; on loopback only.")] = False,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="When told to end, give jobs so long for a checkpoint; 0: they go on.")
    ] = 0,
    json: _Json = False,
) -> int:
    """Serve jobs over REST until stopped; jobs outlive the service, and it finds them again."""
    from nightshift.cli.up import serve

    return serve(
        host=host,
        port=port,
        grpc_port=grpc_port,
        data_dir=data_dir.expanduser(),
        at_once=at_once,
        allow=allow_path or [],
        fleets=fleets,
        no_token=no_token,
        as_json=json,
        drain_s=drain_seconds,
    )


def submit(
    job: _JobFile,
    overrides: _Overrides = None,
    priority: Annotated[int, typer.Option(min=-100, max=100, help="Higher goes first.")] = 0,
    project: Annotated[str | None, typer.Option(help="For tokens of all projects.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show the job until it has ended.")] = False,
    url: _Url = None,
    json: _Json = False,
) -> int:
    """Send a job, with the files that it names, to a service."""
    from nightshift.cli import jobs

    return jobs.submit(url, job, overrides or [], priority=priority, project=project, wait=wait, as_json=json)


def list_jobs(
    state: Annotated[
        list[str] | None,
        typer.Option(help="Only in this state; repeat it for several.", autocompletion=completion.states),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Only with this name.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Most jobs shown; 0: all.")] = 20,
    url: _Url = None,
    json: _Json = False,
) -> int:
    """List the jobs of a service, the newest first."""
    from nightshift.cli import jobs

    return jobs.list_jobs(url, states=state or [], name=name, limit=limit, as_json=json)


def show(job: _Job, url: _Url = None, json: _Json = False) -> int:
    """Show one job with its job file."""
    from nightshift.cli import jobs

    return jobs.show(url, job, as_json=json)


def pause(job: _Job, url: _Url = None, json: _Json = False) -> int:
    """Let a job leave a checkpoint and free what it holds."""
    from nightshift.cli import jobs

    return jobs.steer(url, job, "pause", as_json=json)


def resume(job: _Job, url: _Url = None, json: _Json = False) -> int:
    """Queue a paused, cancelled or failed job again; it goes on from its newest checkpoint."""
    from nightshift.cli import jobs

    return jobs.steer(url, job, "resume", as_json=json)


def cancel(job: _Job, url: _Url = None, json: _Json = False) -> int:
    """End a job."""
    from nightshift.cli import jobs

    return jobs.steer(url, job, "cancel", as_json=json)


def delete(job: _Job, url: _Url = None, json: _Json = False) -> int:
    """Remove a job that has ended, with everything that it wrote."""
    from nightshift.cli import jobs

    return jobs.steer(url, job, "delete", as_json=json)


def set_settings(
    job: _Job,
    pairs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value…]", help="Left out: show them.", autocompletion=completion.settings),
    ] = None,
    url: _Url = None,
    json: _Json = False,
) -> int:
    """Change settings of a job while it runs, or show which can change."""
    from nightshift.cli import jobs

    return jobs.change(url, job, pairs or [], as_json=json)


def fleets(
    name: Annotated[str | None, typer.Argument(metavar="[FLEET]", help="Left out: all of them.")] = None,
    url: _Url = None,
    json: _Json = False,
) -> int:
    """Show the fleets of rollout servers of a service, or who has the servers of one, and on what grounds."""
    from nightshift.cli import fleets as shown

    return shown.show_fleet(url, name, as_json=json) if name else shown.list_fleets(url, as_json=json)


def token(
    name: Annotated[str, typer.Argument(help="Whose it is: stands in the audit log.")],
    scope: Annotated[
        list[str],
        typer.Option(help="read, submit, code or admin; repeat it for several.", autocompletion=completion.scopes),
    ],
    project: Annotated[str | None, typer.Option(help="Left out: all projects.")] = None,
    days: Annotated[float | None, typer.Option(min=0.001, help="Left out: it does not expire.")] = None,
    url: _Url = None,
    json: _Json = False,
) -> int:
    """Make a token of a service and print it, this once."""
    from nightshift.cli import jobs

    return jobs.make_token(url, name, scope, project=project, days=days, as_json=json)


def import_verl(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="A PPO or GRPO configuration of verl.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value…]", help="Hydra's overrides.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The job file; left out: beside the configuration.")
    ] = None,
    json: _Json = False,
) -> int:
    """Make a job file of a verl configuration, and say what became of each key."""
    from nightshift.cli.import_verl import show_import

    return show_import(config, overrides or [], output, as_json=json)


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.command()(command(up))
    app.command()(command(submit))
    app.command("list")(command(list_jobs))
    app.command("set")(command(set_settings))
    app.command("import-verl")(command(import_verl))
    for function in (show, pause, resume, cancel, delete, fleets, token):
        app.command()(command(function))
