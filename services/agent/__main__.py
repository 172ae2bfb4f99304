"""``python -m services.agent --run-dir DIR --otlp URL``: the services of one run on this machine, until told to stop.

Exit codes: 0 stopped, 2 bad input (a port taken, no model), 1 another failure. The run's ``events.jsonl`` says which
role failed, why, and what to do.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from nightshift.wire import logs
from services.agent.supervisor import ROLES, Supervisor
from services.rollout.keeper import die_with_parent


def main() -> int:
    """Runs the agent."""
    parser = argparse.ArgumentParser(prog="python -m services.agent")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--otlp", default="", help="http://host:port of the OTLP/gRPC receiver of the run")
    parser.add_argument(
        "--roles", default=",".join(ROLES), help="what to start, separated by commas; all that the job leaves here"
    )
    arguments = parser.parse_args()
    logs.setup("agent", arguments.run_dir.resolve().name)
    # A killed parent ends the agent as SIGTERM does: in order, with nothing left.
    die_with_parent(signal.SIGTERM)
    code = Supervisor(
        arguments.run_dir.resolve(), arguments.otlp or None, roles=frozenset(arguments.roles.split(","))
    ).run()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads that wait for a part that never answered, and Ray's exit handlers, would hold it up.
    os._exit(code)


if __name__ == "__main__":
    main()
