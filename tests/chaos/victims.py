"""Processes of a run that are killed: who they are, and kill -9."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Victim:
    """One kind of process.

    Attributes:
        needle: text of its command line; ``without``: text that rules another process out.
        role: what its keeper gives up where it dies three times within 20 s of its start; "": Ray never does.
    """

    name: str
    needle: str
    without: str = "\0"
    role: str = ""

    def is_it(self, command: str) -> bool:
        """Whether this is the command line of such a process."""
        return self.needle in command and self.without not in command


VICTIMS = {
    victim.name: victim
    for victim in (
        Victim("server", "vllm.entrypoints.openai.api_server", without="keeper.py", role="rollout"),
        Victim("engine", "VLLM::EngineCore", role="rollout"),
        Victim("scorer", "ServeReplica:re"),
        Victim("rank", "RankActor", role="trainer"),
        Victim("controller", "ServeController"),
        Victim("orchestrator", "orchestrator.runner", role="orchestrator"),
    )
}


def processes(root: int) -> Iterator[tuple[int, str]]:
    """Id and command line of all processes below one."""
    for process in psutil.Process(root).children(recursive=True):
        try:
            yield process.pid, " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue


def find(root: int, victim: Victim) -> list[int]:
    """The victims below a process."""
    return [pid for pid, command in processes(root) if victim.is_it(command)]


def kill(pid: int) -> bool:
    """kill -9; whether the process was there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
