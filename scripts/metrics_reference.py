"""Writes the tables of docs/observability.md from nightshift.wire.metrics; ``--check``: are they up to date?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nightshift.wire import metrics

PAGE = Path(__file__).resolve().parent.parent / "docs" / "observability.md"
TABLES = {"metrics": metrics.table, "labels": metrics.label_table}


def with_tables(page: str) -> str:
    """The page with its tables made anew between their marks.

    Raises:
        ValueError: the page lacks a mark.
    """
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: made by make docs -->", f"<!-- end of {name} -->"
        if begin not in page or end not in page:
            raise ValueError(f"{PAGE.name} lacks the marks of the table {name!r}")
        head, rest = page.split(begin, 1)
        page = f"{head}{begin}\n\n{make()}\n\n{end}{rest.split(end, 1)[1]}"
    return page


def main() -> int:
    """Runs the command line; 0: done or up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is not up to date")
    check = parser.parse_args().check
    old = PAGE.read_text(encoding="utf-8")
    new = with_tables(old)
    if check and new != old:
        print(f"{PAGE.name} is not what nightshift/wire/metrics.py says: run make docs", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
