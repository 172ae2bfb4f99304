"""``nightshift watch``: the progress of a run that another process drives."""

from __future__ import annotations

import time

from rich.console import Console

from nightshift.cli.output import EXIT_DONE, EXIT_FAILED, fail
from nightshift.cli.progress import progress_for
from nightshift.cli.runs import EVENTS, find_run
from nightshift.cli.tail import Tail
from nightshift.cli.view import RunView

_POLL_S = 0.2
_ENDED = frozenset({"succeeded", "failed", "interrupted"})


def watch_run(run: str, runs_dir: str, *, as_json: bool) -> int:
    """Shows a run from its start until it ends. Returns 0 where it succeeded, else 1.

    Raises:
        BadInputError: there is no such run.
    """
    folder = find_run(run, runs_dir)
    view = RunView(run_id=folder.name)
    tail = Tail(folder / EVENTS, from_start=True)
    with progress_for(view, Console(), as_json=as_json) as progress:
        while True:
            for event in tail.read():
                view.apply(event)
                progress.show(event)
            if view.job_state in _ENDED:
                break
            time.sleep(_POLL_S)
    if view.job_state == "failed":
        fail(view.failure or "the job failed")
    return EXIT_DONE if view.job_state == "succeeded" else EXIT_FAILED
