"""``nightshift up``: the job service, until it is stopped. Jobs outlive it, and it finds them again.

Where they cannot, as in a container that ends with it, it drains: they leave a checkpoint first, and the next service
goes on with them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from nightshift.cli import prepare


def serve(
    *,
    host: str,
    port: int,
    grpc_port: int | None,
    data_dir: Path,
    at_once: int,
    allow: Sequence[Path],
    fleets: Path | None,
    no_token: bool,
    as_json: bool,
    drain_s: float = 0.0,
) -> int:
    """Becomes the service's process; returns only where it cannot be started.

    Raises:
        BadInputError: only the client was installed.
    """
    prepare.check_installation()
    arguments = ["--host", host, "--port", str(port), "--data-dir", str(data_dir), "--at-once", str(at_once)]
    for path in allow:
        arguments += ["--allow-path", str(path)]
    arguments += ["--grpc-port", str(grpc_port)] if grpc_port is not None else []
    arguments += ["--fleets", str(fleets.absolute())] if fleets is not None else []
    arguments += ["--no-token"] if no_token else []
    arguments += ["--drain-seconds", str(drain_s)] if drain_s else []
    arguments += ["--json"] if as_json else []
    command = prepare.module("orchestrator.api", *arguments)
    # In place of this process: whoever ends or kills the command ends the service.
    os.execve(command[0], command, prepare.environment())
