"""The keeper: nothing outlives it, and it does not outlive its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.rollout import keeper, launch
from services.rollout.launch import VllmServer

KEEPER = keeper.__file__


def start(command, *options, parent=None):
    argv = [sys.executable, KEEPER, "--parent", str(parent or os.getpid()), "--grace", "3", *options, "--", *command]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)


def python(code):
    return [sys.executable, "-c", code]


def gone(pids, seconds=60.0):
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


# A child that ignores SIGTERM, in a session of its own, whose parent waits: what must not be left behind.
STUBBORN = (
    "import signal, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN);"
    " print(1, flush=True); time.sleep(600)'], start_new_session=True, stdout=subprocess.PIPE)\n"
    "child.stdout.readline(); print(child.pid, flush=True)\n"
)


@pytest.mark.parametrize(
    ("code", "expected"), [("exit(0)", 0), ("exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_code_is_the_commands(code, expected):
    assert start(python(code)).wait(20) == expected


def test_the_command_runs_on_the_given_cores():
    core = min(os.sched_getaffinity(0))
    process = start(python("import os; print(os.sched_getaffinity(0))"), "--cores", str(core))
    assert process.communicate(timeout=60)[0].strip() == f"{{{core}}}"


def test_what_the_command_leaves_behind_ends_with_it():
    process = start(python(STUBBORN))
    orphan = int(process.stdout.readline())
    assert process.wait(20) == 0
    assert gone([orphan]) == []


def test_sigterm_ends_everything_in_order():
    code = STUBBORN + "signal.signal(15, lambda *_: sys.exit(5)); print('up', flush=True); time.sleep(600)"
    process = start(python(code))
    orphan = int(process.stdout.readline())
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 5  # the command had its say
    assert gone([orphan]) == []


def test_everything_ends_when_the_parent_is_killed():
    code = f"import subprocess, sys, os, time\nsys.argv = {[KEEPER, *python(STUBBORN + 'time.sleep(600)')]!r}\n" + (
        "process = subprocess.Popen([sys.executable, sys.argv[0], '--parent', str(os.getpid()), '--grace', '1', '--',"
        " *sys.argv[1:]], start_new_session=True)\nprint(process.pid, flush=True)\ntime.sleep(600)"
    )
    parent = subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True)
    pids = [int(parent.stdout.readline()), int(parent.stdout.readline())]
    pids += keeper.descendants(pids[0])
    parent.kill()
    parent.wait()
    assert gone(pids) == []


def test_a_keeper_whose_parent_has_died_already_starts_nothing():
    process = start(python("print('started')"), parent=1)
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 1


def test_a_server_whose_processes_are_all_stopped_is_killed_at_once():
    """As for a server that hangs: nothing of it hears a request to end, and the keeper's grace is not waited for."""
    process = start(python(STUBBORN + "time.sleep(600)"))
    child = int(process.stdout.readline())
    pids = [process.pid, *keeper.descendants(process.pid)]
    assert child in pids
    for pid in reversed(pids):
        os.kill(pid, signal.SIGSTOP)
    server = VllmServer.__new__(VllmServer)
    server._process = process
    began = time.monotonic()
    server.kill()
    assert time.monotonic() - began < launch._STOP_GRACE_S
    process.wait(60)
    assert gone(pids) == []
    server.stop()  # harmless after it


def test_a_server_that_was_never_started_is_killed_without_harm():
    server = VllmServer.__new__(VllmServer)
    server._process = None
    server.kill()
