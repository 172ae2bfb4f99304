"""Job files in either form: our own, or a configuration of verl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from nightshift.compat.verl import import_verl, is_verl
from nightshift.config import JobSpec
from nightshift.config.load import load_job, parse_job


def load_any(
    path: Path, overrides: Sequence[str] = (), say: Callable[[str], None] | None = None, *, check_files: bool = True
) -> JobSpec:
    """A job file, or a verl configuration as a job.

    Args:
        overrides: ``key=value``, with the keys of the file's own form.
        say: called with a sentence for each key of a verl configuration that is not supported.

    Raises:
        BadInputError: the file is wrong.
    """
    if not is_verl(path):
        return load_job(path, overrides, check_files=check_files)
    folder = path.resolve().parent
    made = import_verl(path, overrides)
    for name, content in made.files.items():
        (folder / name).write_text(content, encoding="utf-8")
    source = f"the job made of {path}"
    spec = parse_job(yaml.safe_dump(made.job).encode(), folder, source=source, check_files=check_files)
    for line in made.lines:
        if say is not None and line.verdict == "not supported":
            say(str(line))
    return spec
