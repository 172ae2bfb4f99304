"""``python -m services.rollout.serve JOB [key=value…]``: one vLLM server for runs on other machines, by URL.

It becomes the server that ``nightshift run`` would start for the job file, reachable under ``--host``. Its token is
``NIGHTSHIFT_ROLLOUT_TOKEN``; weights come from below ``NIGHTSHIFT_WEIGHT_URL`` alone, into ``NIGHTSHIFT_WEIGHT_CACHE``,
or from the trainer by NCCL where the job's ``rollout.weight_transfer`` is nccl.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

from nightshift.config.load import load_job
from nightshift.gpu import find_device
from nightshift.wire.errors import BadInputError, NightshiftError
from services.rollout.command import ServerCommand, server_command
from services.rollout.guard import TOKEN_VARIABLE
from services.rollout.launch import KEEP_ALIVE_S, max_positions
from services.rollout.pull import CACHE_VARIABLE, URL_VARIABLE
from services.rollout.request_log import LOG_VARIABLE, NAME_VARIABLE
from services.rollout.route import INCARNATION_VARIABLE


def command_of(job: Path, overrides: list[str], host: str, port: int, environment: dict[str, str]) -> ServerCommand:
    """The command and the environment of the server.

    Raises:
        BadInputError: the job cannot be read, its model is no local folder, or a variable is missing.
    """
    spec = load_job(job, overrides, check_files=False)
    nccl = spec.rollout.weight_transfer == "nccl"
    needed = (TOKEN_VARIABLE,) if nccl else (TOKEN_VARIABLE, URL_VARIABLE)
    if missing := [name for name in needed if not environment.get(name)]:
        raise BadInputError(f"{' and '.join(missing)} must be set for a server that others reach", role="rollout")
    device = find_device(spec.resources.device)
    cache = environment.get(CACHE_VARIABLE)
    command = server_command(
        spec,
        host=host,
        port=port,
        token=environment[TOKEN_VARIABLE],
        store=None,
        device=device,
        cores=spec.resources.rollout_cores or [] if device == "cpu" else [],
        gpu=spec.resources.rollout_gpu,
        weight_backend="nccl" if nccl else "safetensors",
        weights_url=environment.get(URL_VARIABLE) or None,
        cache=Path(cache) if cache else None,
        otlp=environment.get("NIGHTSHIFT_OTLP_ENDPOINT") or None,
        max_positions=max_positions(Path(spec.model.path)),
        base_env=environment,
    )
    env = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": KEEP_ALIVE_S, NAME_VARIABLE: "rollout", **command.env}
    return ServerCommand(command.argv, env | {INCARNATION_VARIABLE: secrets.token_hex(8)})


def main() -> None:
    """Becomes the server."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout.serve")
    parser.add_argument("job", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--request-log", type=Path, help=f"what it serves is written there ({LOG_VARIABLE})")
    arguments = parser.parse_args()
    environment = dict(os.environ)
    if arguments.request_log:
        environment[LOG_VARIABLE] = str(arguments.request_log)
    try:
        command = command_of(arguments.job, arguments.overrides, arguments.host, arguments.port, environment)
    except NightshiftError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    os.execve(command.argv[0], command.argv, command.env)


if __name__ == "__main__":
    main()
