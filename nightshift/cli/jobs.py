"""The commands that speak to a job service: thin clients of its API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from nightshift.cli.output import EXIT_DONE, EXIT_FAILED, WAITING, duration, fail, print_json, waiting
from nightshift.cli.progress import progress_for
from nightshift.cli.view import RunView
from nightshift.client import Client
from nightshift.client.models import Job
from nightshift.wire.errors import BadInputError


def submit(
    url: str | None,
    job: Path,
    overrides: Sequence[str],
    *,
    priority: int,
    project: str | None,
    wait: bool,
    as_json: bool,
) -> int:
    """Sends a job with its files."""
    with Client(url) as client:
        with waiting("submitting the job with its files"):
            made = client.submit(job, overrides, priority=priority, project=project)
        if as_json:
            print_json(asdict(made))
        else:
            print(made.id)
        return watch_job(client, made.id, as_json=as_json) if wait else EXIT_DONE


def list_jobs(url: str | None, *, states: Sequence[str], name: str | None, limit: int, as_json: bool) -> int:
    """Prints jobs, the newest first."""
    with Client(url) as client, waiting(WAITING):
        found = []
        for job in client.jobs(states=states, name=name, page=min(limit, 500) or 100):
            found.append(job)
            if limit and len(found) >= limit:
                break
    if as_json:
        for job in found:
            print_json(asdict(job))
        return EXIT_DONE
    width = max((len(job.id) for job in found), default=2)
    print(f"{'id':<{width}}  {'state':<10}  {'project':<12}  {'step':>9}  {'age':>12}")
    for job in found:
        print(
            f"{job.id:<{width}}  {state_of(job):<10}  {job.project:<12}  {job.step:>4}/{job.steps or '?':<4}  "
            f"{duration(max(0.0, time.time() - job.submitted)):>12}"
        )
    return EXIT_DONE


def state_of(job: Job) -> str:
    """A job's state as people read it."""
    return "pausing" if job.pausing else job.state


def show(url: str | None, name: str, *, as_json: bool) -> int:
    """Prints one job with its job file."""
    with Client(url) as client, waiting(WAITING):
        job = client.get(client.find(name).id)
    if as_json:
        print_json(asdict(job))
        return EXIT_DONE
    print(f"{job.id}: {state_of(job)}, step {job.step}/{job.steps or '?'}")
    if job.error:
        print(job.error)
    print(yaml.safe_dump(job.spec, sort_keys=False).rstrip())
    return EXIT_DONE


def steer(url: str | None, name: str, call: str, *, as_json: bool) -> int:
    """Pauses, resumes, cancels or deletes a job."""
    with Client(url) as client, waiting(WAITING):
        job_id = client.find(name).id
        job: Job | None = getattr(client, call)(job_id)
    if job is None:
        print_json({"id": job_id, "deleted": True}) if as_json else print(f"{job_id}: deleted")
    elif as_json:
        print_json(asdict(job))
    else:
        print(f"{job.id}: {state_of(job)}")
    return EXIT_DONE


def change(url: str | None, name: str, pairs: Sequence[str], *, as_json: bool) -> int:
    """Changes live settings, or prints them where none are given."""
    changes = dict(_pair(text) for text in pairs)
    with Client(url) as client, waiting(WAITING):
        job_id = client.find(name).id
        answer = client.set(job_id, changes) if changes else client.settings(job_id)
    if as_json:
        print_json(answer)
        return EXIT_DONE
    for setting in answer["settings"]:
        if not changes or setting["key"] in changes or setting["key"] in answer["pending"]:
            pending = answer["pending"].get(setting["key"])
            new = f" -> {pending!r} at the next step boundary" if setting["key"] in answer["pending"] else ""
            fixed = "" if setting["live"] else f"  (fixed: {setting['why']})"
            print(f"{setting['key']} = {setting['value']!r}{new}{fixed}")
    return EXIT_DONE


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise BadInputError(f"{text!r} is not a setting: write key=value")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        return key.strip(), value


def watch_job(client: Client, job_id: str, *, as_json: bool) -> int:
    """Shows a job until it has ended or is paused. Returns 0 where it succeeded, else 1."""
    view = RunView(run_id=job_id)
    with progress_for(view, Console(), as_json=as_json) as progress:
        for event in client.events(job_id):
            view.apply(event.data)
            progress.show(event.data)
    job = client.get(job_id)
    if job.state == "failed":
        fail(job.error or view.failure or "the job failed")
    elif job.state != "succeeded" and not as_json:
        print(f"{job_id}: {job.state}")
    return EXIT_DONE if job.state == "succeeded" else EXIT_FAILED


def watch(url: str | None, name: str, *, as_json: bool) -> int:
    """Follows a job of a service."""
    with Client(url) as client:
        return watch_job(client, client.find(name).id, as_json=as_json)


def make_token(
    url: str | None, name: str, scopes: Sequence[str], *, project: str | None, days: float | None, as_json: bool
) -> int:
    """Makes a token and prints it, which it does this once."""
    body = {"name": name, "scopes": list(scopes), "project": project, "ttl_s": days * 86400 if days else None}
    with Client(url) as client, waiting(WAITING):
        made = client.make_token(body)
    print_json(made) if as_json else print(made["token"])
    return EXIT_DONE
