"""Runs programs from responses: each in a process of its own without a network, with limits of time and memory.

The child enters a network namespace with nothing in it and a process namespace that ends with it, gives up the right to
gain privileges, and is bounded in CPU time, address space and files before it runs the program; a wall clock is kept
from outside. It works in an empty folder with an empty environment. Its view of the file system is that of the scorer:
what the scorer's user may read, a program may read. Where the machine allows no such namespaces, the reward is refused
at its start rather than run without.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from nightshift.wire.errors import BadInputError
from nightshift.wire.scoring import RewardResult
from services.scorers.results import result

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_OUTPUT_BYTES = 1 << 20
_MIB = 1 << 20
#: Runs in the child before anything of the program: limits, then the program from its file.
_PREAMBLE = """\
import ctypes, os, resource, sys
cpu, memory, path, mark = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4].encode()
libc = ctypes.CDLL(None, use_errno=True)
# CLONE_NEWNET and CLONE_NEWPID; without the right to them, in a user namespace of its own (CLONE_NEWUSER)
if libc.unshare(0x60000000) and libc.unshare(0x70000000):
    os.write(2, b"no network namespace"); os._exit(97)
child = os.fork()
if child:  # the child is the first process of its namespace: whatever it starts ends with it
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))
libc.prctl(1, 9)  # PR_SET_PDEATHSIG
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
for name, value in (("CPU", cpu), ("AS", memory), ("FSIZE", 1 << 20), ("NOFILE", 64), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
try:
    resource.setrlimit(resource.RLIMIT_NPROC, (64, 64))
except ValueError:
    pass
source = open(path, encoding="utf-8").read()
sys.argv = ["program.py"]
exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
sys.stdout.flush()
os.write(2, mark)
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run of a program ended: "ok", "failed", "timeout", "memory" or "sandbox" (it could not be made).

    ``finished`` says that its last line was reached: a program may also leave earlier, with ``exit()``, and be "ok".
    """

    kind: str
    output: str
    error: str = ""
    finished: bool = False


def run_program(source: str, text: str, *, cpu_s: float, memory_mib: int, wall_s: float) -> Outcome:
    """Runs a Python program once.

    That it was run to its end is told by a mark, new for each run. It lies in the program's own process: who looks for
    it finds it. Against programs that mean to cheat, compare what they print.

    Args:
        source: the program.
        text: what it reads from standard input.
        cpu_s: CPU seconds, rounded up to whole ones.
        memory_mib: address space.
        wall_s: longest time by the clock.
    """
    with tempfile.TemporaryDirectory(prefix="nightshift-code-") as folder:
        path = os.path.join(folder, "program.py")  # noqa: PTH118
        with open(path, "w", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            file.write(source)
        mark = f"<end {os.urandom(16).hex()}>"
        limits = [str(max(1, round(cpu_s + 0.499))), str(memory_mib * _MIB), path, mark]
        with (
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PREAMBLE, *limits],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
                start_new_session=True,
            ) as process,
        ):
            late = False
            try:
                process.communicate(text.encode("utf-8", "replace"), timeout=wall_s)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output, error = (_read(file) for file in (out, err))
        outcome = _outcome(process.returncode, late, output, error.replace(mark, ""))
        return replace(outcome, finished=outcome.kind == "ok" and error.endswith(mark))


def _read(file: Any) -> str:
    file.seek(0)
    return str(file.read(_OUTPUT_BYTES).decode("utf-8", "replace"))


def _outcome(code: int, late: bool, output: str, error: str) -> Outcome:
    last = (error.strip().splitlines() or [""])[-1][:300]
    if code == 97 and "no network namespace" in error:
        return Outcome("sandbox", output, "no network namespace can be made")
    if late or code == -signal.SIGXCPU or (code == -signal.SIGKILL and not last):
        return Outcome("timeout", output, "it took too long")
    if last.startswith("MemoryError") or code == -signal.SIGSEGV:
        return Outcome("memory", output, "it took too much memory")
    return Outcome("ok" if code == 0 else "failed", output, "" if code == 0 else last or f"exit code {code}")


def program_of(response: str) -> str:
    """The program in a response: its last fenced block, or all of it where it has none."""
    blocks = _FENCE.findall(response)
    return str(blocks[-1]) if blocks else response


class CodeScorer:
    """Scores responses by the tests that their programs pass.

    Args:
        settings: fields of :class:`nightshift.config.rewards.CodeReward`.

    Raises:
        BadInputError: this machine lets no sandbox be made.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        probe = run_program("print(1)", "", cpu_s=5, memory_mib=max(64, settings["memory_mib"]), wall_s=30)
        if probe.kind != "ok" or probe.output.strip() != "1":
            raise BadInputError(
                f"programs cannot be run in a sandbox here: {probe.error or probe.kind}",
                role="reward",
                fix="Allow user namespaces on this machine, or score the code on another one (type grpc)",
            )
        self._pool = ThreadPoolExecutor(settings["workers"], "code")

    def score(self, samples: Sequence[Mapping[str, Any]]) -> list[RewardResult]:
        """Scores in the order of the samples; a row without tests leaves its sample unscored."""
        return list(self._pool.map(self._one, samples))

    def _one(self, sample: Mapping[str, Any]) -> RewardResult:
        began = time.perf_counter()
        tests = _tests(sample.get("ground_truth"))
        if not tests:
            return result(sample, None, began, "none", "the row has no tests as its ground_truth")
        program, passed = program_of(sample["response"]), 0
        deadline = began + self._settings["timeout_s"]
        kinds: dict[str, float] = {}
        for behind, text, wanted in tests:
            left = deadline - time.perf_counter()
            if left <= 0:
                return result(sample, None, began, "timeout", f"took longer than {self._settings['timeout_s']:g} s")
            outcome = run_program(
                f"{program}\n{behind}",
                text,
                cpu_s=self._settings["cpu_s"],
                memory_mib=self._settings["memory_mib"],
                wall_s=min(left, 2 * self._settings["cpu_s"] + 1),
            )
            if outcome.kind == "sandbox":
                return result(sample, None, began, "raised", f"the sandbox failed: {outcome.error}")
            kinds[outcome.kind] = kinds.get(outcome.kind, 0.0) + 1
            # Assertions stand behind the program: one that leaves before them has passed none.
            right = outcome.finished if wanted is None else outcome.kind == "ok" and _same(outcome.output, wanted)
            passed += right
            if not right and not self._settings["partial"]:
                break
        share = passed / len(tests)
        score = share if self._settings["partial"] else float(passed == len(tests))
        scored = result(sample, score, began)
        scored["parts"] = {"tests_passed": share, "timeouts": kinds.get("timeout", 0.0)}
        return scored


def _tests(value: Any) -> list[tuple[str, str, str | None]]:
    """Tests as (code behind the program, its input, its wanted output or None)."""
    if isinstance(value, str):
        return [(value, "", None)] if value.strip() else []
    if isinstance(value, Mapping):
        value = value.get("tests")
    if not isinstance(value, list):
        return []
    found: list[tuple[str, str, str | None]] = []
    for item in value:
        if isinstance(item, str):
            found.append((item, "", None))
        elif isinstance(item, Mapping) and isinstance(item.get("output"), str):
            found.append(("", str(item.get("input") or ""), item["output"]))
        else:
            return []
    return found


def _same(got: str, wanted: str) -> bool:
    """Whether two outputs agree apart from spaces at the ends of lines."""
    return [line.rstrip() for line in got.strip().splitlines()] == [
        line.rstrip() for line in wanted.strip().splitlines()
    ]
