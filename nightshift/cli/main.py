"""The command line. What is heavy is imported by the command that needs it: ``--help`` takes a fraction of a second."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from nightshift import __version__
from nightshift.cli import completion, service
from nightshift.cli.output import EXIT_FAILED, command, print_json, waiting

app = typer.Typer(
    name="nightshift",
    help="Reinforcement-learning post-training for language models: rollouts by vLLM, rewards by Ray Serve, updates by "
    "DeepSpeed, all at once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value…]", help="Values in place of the file's.", autocompletion=completion.overrides),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's folder, or its id or the beginning of it.", autocompletion=completion.runs
    ),
]
RunsDir = Annotated[str, typer.Option("--runs-dir", help="Folder of the runs.", envvar="NIGHTSHIFT_RUNS_DIR")]
Url = Annotated[
    str | None, typer.Option("--url", help="A job service; RUN is one of its jobs then.", envvar="NIGHTSHIFT_URL")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command()
@command
def run(
    job: JobFile,
    overrides: Overrides = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="Go on with a run from its checkpoint.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of this run; else one below resources.runs_dir.")] = None,
    json: Json = False,
) -> int:
    """Run a job on this machine: start what it needs, show progress, leave nothing running."""
    from nightshift.cli.run import run_job
    from nightshift.wire.errors import BadInputError

    if resume is not None and run_dir is not None:
        raise BadInputError("--resume goes on in the run's own folder: leave --run-dir out")
    return run_job(job, overrides or [], resume=resume, run_dir=run_dir, as_json=json)


@app.command()
@command
def plan(job: JobFile, overrides: Overrides = None, json: Json = False) -> int:
    """Check a job, measure its prompts and estimate its memory, without starting anything."""
    from nightshift.cli.plan import plan_job

    return plan_job(job, overrides or [], as_json=json)


@app.command()
@command
def trace(
    trace_id: Annotated[str, typer.Argument(metavar="TRACE_ID", help="32 hex digits, or the beginning of them.")],
    run: Annotated[str | None, typer.Option(help="The run; else the newest one that knows the trace.")] = None,
    runs_dir: RunsDir = "runs",
    url: Url = None,
    json: Json = False,
) -> int:
    """Show the timeline of one prompt group, from the prompt to the gradient."""
    if _remote(url, run):
        from nightshift.cli import remote

        return remote.trace(url, trace_id, run, as_json=json)

    from nightshift.cli.trace import show_trace

    return show_trace(trace_id, run, runs_dir, as_json=json)


@app.command()
@command
def rollouts(
    run: Run,
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Most rows shown, the newest steps first; 0: all.")] = 20,
    runs_dir: RunsDir = "runs",
    url: Url = None,
    json: Json = False,
) -> int:
    """Show what was generated, with rewards, lengths and policy versions."""
    if _remote(url, run):
        from nightshift.cli import remote

        return remote.rollouts(url, run, as_json=json, step=step, limit=limit)

    from nightshift.cli.rollouts import show_rollouts

    return show_rollouts(run, runs_dir, step=step, limit=limit, as_json=json)


@app.command()
@command
def watch(run: Run, runs_dir: RunsDir = "runs", url: Url = None, json: Json = False) -> int:
    """Follow a run that goes on elsewhere."""
    if _remote(url, run):
        from nightshift.cli import jobs

        return jobs.watch(url, run, as_json=json)

    from nightshift.cli.watch import watch_run

    return watch_run(run, runs_dir, as_json=json)


@app.command()
@command
def logs(
    run: Run,
    role: Annotated[str | None, typer.Argument(metavar="[ROLE]", help="Whose log; left out: which there are.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Last lines shown.")] = 200,
    runs_dir: RunsDir = "runs",
    url: Url = None,
    json: Json = False,
) -> int:
    """Print the log of a role."""
    if _remote(url, run):
        from nightshift.cli import remote

        return remote.logs(url, run, as_json=json, role=role, lines=lines)

    from nightshift.cli.logs import show_logs

    return show_logs(run, runs_dir, role, lines, as_json=json)


@app.command()
@command
def ledger(run: Run, runs_dir: RunsDir = "runs", url: Url = None, json: Json = False) -> int:
    """Show what became of every prompt group that was issued."""
    if _remote(url, run):
        from nightshift.cli import remote

        return remote.ledger(url, run, as_json=json)

    from nightshift.cli.ledger import show_ledger

    return show_ledger(run, runs_dir, as_json=json)


@app.command()
@command
def audit(run: Run, runs_dir: RunsDir = "runs", json: Json = False) -> int:
    """Check from manifests, stored rollouts and the servers' own logs that nothing was lost or trained twice."""
    from nightshift.cli.audit import show_audit

    return show_audit(run, runs_dir, as_json=json)


@app.command()
@command
def report(run: Run, runs_dir: RunsDir = "runs", url: Url = None, json: Json = False) -> int:
    """Compare a run's step time with the model's, show who was idle, and say what to change."""
    if _remote(url, run):
        from nightshift.cli import remote

        return remote.report(url, run, as_json=json)

    from nightshift.cli.report_command import show_report

    return show_report(run, runs_dir, as_json=json)


@app.command()
@command
def replay(
    run: Run,
    step: Annotated[int, typer.Option(help="The step to make again, counted from 1.")],
    runs_dir: RunsDir = "runs",
    json: Json = False,
) -> int:
    """Make a step of a run again from its stored experience, and report any difference."""
    from nightshift.cli.replay import show_replay

    return show_replay(run, runs_dir, step=step, as_json=json)


@app.command()
@command
def export(
    run: Run,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to be made.")],
    step: Annotated[int | None, typer.Option(help="Which checkpoint; left out: the newest.")] = None,
    runs_dir: RunsDir = "runs",
    url: Url = None,
    json: Json = False,
) -> int:
    """Copy a run's HF checkpoint."""
    if _remote(url, run):
        from nightshift.cli import remote

        return remote.export(url, run, as_json=json, folder=folder, step=step)

    from nightshift.cli.export import export_checkpoint

    return export_checkpoint(run, runs_dir, folder, step, as_json=json)


@app.command()
@command
def doctor(json: Json = False) -> int:
    """Say what this machine has, what is missing, and how to get it."""
    from nightshift.cli.doctor import show_doctor

    return show_doctor(as_json=json)


service.register(app)


def _remote(url: str | None, run: str | None) -> bool:
    """Whether a service is asked; a folder that is there is read as it stands."""
    return url is not None and (run is None or not Path(run).is_dir())


data = typer.Typer(help="Data files.", no_args_is_help=True)
app.add_typer(data, name="data")


@data.command()
@command
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="JSONL (or parquet) with chosen and rejected.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET.parquet", help="File to be made.")],
    prompt_key: Annotated[str, typer.Option(help="Column of the prompt.")] = "prompt",
    json: Json = False,
) -> int:
    """Convert preference pairs to parquet: prompt as messages, chosen and rejected as texts."""
    from nightshift.data.convert import convert_preferences

    with waiting("converting"):
        pairs = convert_preferences(source, target, prompt_key)
    print_json({"pairs": pairs, "file": str(target)}) if json else print(f"{pairs} pairs in {target}")
    return 0


def _version(value: bool) -> None:
    if value:
        print(f"nightshift {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    try:
        app(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="nightshift")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_FAILED if end.code else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
