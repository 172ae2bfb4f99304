"""``nightshift import-verl``: a job file made of a verl configuration, with a line for each of its keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import yaml

from nightshift.cli.output import EXIT_DONE, print_json
from nightshift.compat.verl import Imported, import_verl
from nightshift.config.load import parse_job
from nightshift.wire.errors import BadInputError


def show_import(config: Path, overrides: Sequence[str], output: Path | None, *, as_json: bool) -> int:
    """Prints what became of each key, and writes the job file, by default beside the configuration.

    Raises:
        BadInputError: the file is no verl configuration, or the job that it makes is wrong.
    """
    made = import_verl(config, overrides)
    target = output or config.with_name(f"{config.stem}.nightshift.yaml")
    _check(made, config)
    text = yaml.safe_dump(made.job, sort_keys=False)
    try:
        target.write_text(text, encoding="utf-8")
        for name, content in made.files.items():
            (target.parent / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"cannot write {str(target)!r}: {error.strerror}") from error
    if as_json:
        print_json({"job_file": str(target), "job": made.job, "lines": [asdict(line) for line in made.lines]})
        return EXIT_DONE
    for line in made.lines:
        print(line)
    missing = sum(line.verdict == "not supported" for line in made.lines)
    print(f"{target}: {len(made.lines) - missing} lines mapped or defaulted, {missing} not supported")
    return EXIT_DONE


def _check(made: Imported, config: Path) -> None:
    source = f"the job made of {config}"
    parse_job(yaml.safe_dump(made.job).encode(), config.resolve().parent, source=source, check_files=False)
