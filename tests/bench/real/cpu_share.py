"""Which processes of this machine take its cores: user and system time of each, in percent of a core.

python -m tests.bench.real.cpu_share [--seconds 15] [--most 14]

Beside a run it says who its stages share their cores with. Prints a line for each process, the busiest first.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def used() -> dict[int, tuple[int, int]]:
    """Process id -> clock ticks of user and of system time until now."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name)] = int(fields[11]), int(fields[12])
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--most", type=int, default=14)
    arguments = parser.parse_args()
    before = used()
    time.sleep(arguments.seconds)
    after = used()
    ticks = {pid: [b - a for a, b in zip(before[pid], now, strict=True)] for pid, now in after.items() if pid in before}
    for pid, (user, system) in sorted(ticks.items(), key=lambda item: -sum(item[1]))[: arguments.most]:
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()[:70].replace(b"\0", b" ").decode(errors="replace")
            shares = (100 * part / _TICKS / arguments.seconds for part in (user, system))
            print("user {:5.1f} %  system {:5.1f} %  {}".format(*shares, command))


if __name__ == "__main__":
    main()
