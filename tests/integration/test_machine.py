"""What the command line asks of the machine it is on: ports on loopback, and the doctor's look around."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from nightshift.cli.main import main
from nightshift.cli.ports import HOST, check_ports, free_port, is_free
from nightshift.config import JobSpec
from nightshift.wire.errors import BadInputError

pytestmark = pytest.mark.integration


def spec(ports: dict[str, int], **rollout: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "a",
            "model": {"path": "m"},
            "data": {"train_files": ["x"]},
            "rewards": [{"function": "a.py:f"}],
            "rollout": rollout,
            "resources": {"ports": ports},
        }
    )


def test_taken_port_is_refused_with_role_and_port() -> None:
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen()
        port = server.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(BadInputError, match=rf"\[trainer\] port {port} is taken.*resources\.ports\.trainer"):
            check_ports(spec({"trainer": port}))
        check_ports(spec({"rollout": port}, url="http://elsewhere:8000"))
    check_ports(spec({"trainer": port}))


def test_one_port_for_two_roles_is_refused() -> None:
    port = free_port()
    with pytest.raises(BadInputError, match=rf"\[otlp\] port {port} is given to scorers too"):
        check_ports(spec({"otlp": port, "scorers": port}))


def test_doctor_answers_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    names = {finding["name"] for finding in json.loads(capsys.readouterr().out)}
    assert {"python", "cores", "memory", "/dev/shm", "c++ compiler", "ninja", "torch", "ports"} <= names
