"""What the command line asks of the machine it is on: ports on loopback, and the doctor's look around."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nightshift.cli import doctor
from nightshift.cli.main import main
from nightshift.cli.ports import HOST, check_ports, free_port, is_free
from nightshift.config import JobSpec
from nightshift.gpu import Driver
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


def finding(name: str) -> doctor.Finding:
    return next(one for one in doctor.examine() if one.name == name)


def full(_folder: str) -> Any:
    return SimpleNamespace(free=0)


def gone(_folder: str) -> Any:
    raise OSError(errno.ENOENT, "No such file or directory")


def no_loopback() -> int:
    raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")


def broken_driver(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(doctor, "ask_driver", lambda: Driver(version="", gpus=(), error="the NVIDIA driver does not answer"))
    patch.setattr(doctor, "cuda_of_torch", lambda: 13)


#: What is looked at, how it is broken, and what is said then: level, words of the finding, words of the fix.
BROKEN: list[tuple[str, Callable[[pytest.MonkeyPatch], None], str, str, str]] = [
    ("torch", lambda p: p.setattr(doctor, "_version", lambda _: None), "missing", "not installed", "make venv"),
    ("tensorboard", lambda p: p.setattr(doctor, "_version", lambda _: None), "note", "not installed", "make venv"),
    ("c++ compiler", lambda p: p.setenv("PATH", "/nowhere"), "missing", "none", "g++"),
    ("/dev/shm", lambda p: p.setattr(doctor.shutil, "disk_usage", full), "note", "free", "--shm-size"),
    ("/dev/shm", lambda p: p.setattr(doctor.shutil, "disk_usage", gone), "missing", "No such file", "--shm-size"),
    ("memory", lambda p: p.setattr("nightshift.cli.plan.machine_memory", lambda: 1 << 30), "note", "1", "plan"),
    ("cores", lambda p: p.setattr(doctor.os, "sched_getaffinity", lambda _: {0}), "note", "1", "take turns"),
    ("repository", lambda p: p.setattr("nightshift.cli.prepare.repository_root", lambda: None), "missing", "", "-e"),
    ("ports", lambda p: p.setattr("nightshift.cli.ports.free_port", no_loopback), "missing", "cannot", "loopback"),
    ("device", broken_driver, "missing", "does not answer", "nvidia-smi"),
]


@pytest.mark.parametrize(("name", "break_it", "level", "says", "fix"), BROKEN)
def test_doctor_says_what_is_wrong_and_how_to_mend_it(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    break_it: Callable[[pytest.MonkeyPatch], None],
    level: str,
    says: str,
    fix: str,
) -> None:
    break_it(monkeypatch)
    found = finding(name)
    assert (found.level, says in found.found, fix in found.fix) == (level, True, True), found
    assert doctor.show_doctor(as_json=True) == 1 or level != "missing"


def test_doctor_knows_its_service_from_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen()
        monkeypatch.setattr(doctor, "SERVICE_PORT", server.getsockname()[1])
        taken = threading.Thread(target=answer, args=(server, b"SSH-2.0-x\r\n"))
        taken.start()
        found = finding("service port")
        taken.join()
        assert (found.level, "taken by another program" in found.found, "--port" in found.fix) == ("note", True, True)
        body = b'{"status": "ok", "version": "9.9"}'
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
        ours = threading.Thread(target=answer, args=(server, head + body))
        ours.start()
        found = finding("service port")
        ours.join()
        assert (found.level, found.found.split()[:2]) == ("ok", ["nightshift", "9.9"])
    monkeypatch.setattr(doctor, "SERVICE_PORT", free_port())
    assert finding("service port").found.endswith("is free for nightshift up")


def answer(server: socket.socket, data: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(data)
