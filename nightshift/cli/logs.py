"""``nightshift logs``: what the roles wrote."""

from __future__ import annotations

import difflib

from nightshift.cli.output import EXIT_DONE, mib, print_json
from nightshift.cli.runs import find_run
from nightshift.cli.tail import last_lines
from nightshift.wire.errors import BadInputError


def show_logs(run: str, runs_dir: str, role: str | None, lines: int, *, as_json: bool) -> int:
    """Prints the last lines of a role's log, or which logs there are.

    Raises:
        BadInputError: there is no such run or log.
    """
    folder = find_run(run, runs_dir) / "logs"
    files = {file.stem: file for file in sorted(folder.glob("*.log"))}
    if role is None:
        for name, file in files.items():
            if as_json:
                print_json({"role": name, "bytes": file.stat().st_size})
                continue
            print(f"{name:<20} {mib(file.stat().st_size):>10}  {file}")
        return EXIT_DONE
    if role not in files:
        near = difflib.get_close_matches(role, files, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(files) or 'none yet'}"
        raise BadInputError(f"the run has no log of {role!r}", fix=hint)
    for line in last_lines(files[role], lines):
        print_json({"role": role, "line": line}) if as_json else print(line)
    return EXIT_DONE
