"""From a dead server's log to one sentence: the cause and the fix."""

from __future__ import annotations

import re

_ERROR_LINE = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Interrupt)): (.+)$")
#: What pydantic writes below "1 validation error for ...", which tells nothing.
_VALIDATION_LINE = re.compile(r"(?:^|\s)((?:Value|Assertion) error), (.+?)(?: \[type=.*)?$")
#: Errors that only say that another one happened.
_ECHOES = ("Engine core initialization failed", "See root cause above", "Failed core proc", "WorkerProc initialization")
_SHOWN = 300


def diagnose(log: str, returncode: int | None, port: int) -> tuple[str, str]:
    """Cause and fix for a server that ended.

    Args:
        log: what it wrote, or the end of that.
        returncode: its exit code, negative for a signal; None: still running.
    """
    if re.search(r"Address already in use|\[Errno 98\]|error while attempting to bind", log, re.IGNORECASE):
        return f"port {port} is taken", "Set resources.ports.rollout to a free port, or to 0 for any free one"
    if match := re.search(r"error: (unrecognized arguments: .+|argument .+|the following arguments .+)", log):
        return (
            f"vLLM does not accept its command line ({match[1][:_SHOWN]})",
            "Correct rollout.extra_args, or install the vLLM version of the lock file",
        )
    if match := re.search(r"No module named '?((?:vllm|torch|services)\b[\w.]*)", log):
        return f"the Python module {match[1]} is missing", "Install the requirements of services/"
    if re.search(r"OutOfMemoryError|CUDA out of memory|Cannot allocate memory|can't allocate memory", log):
        return "out of memory", "Lower rollout.kv_cache_gib or rollout.max_num_seqs, or free memory on this machine"
    if match := re.search(r"(?:Available|Free) memory on (?:node|device).{0,200}?is less than.{0,80}", log, re.DOTALL):
        return " ".join(match[0].split())[:_SHOWN], "Lower rollout.kv_cache_gib, or free memory on this machine"
    error = _root_error(log)
    if error and "KV cache" in error and "max_model_len" in error.replace("max model len", "max_model_len"):
        return error, "Raise rollout.kv_cache_gib or lower rollout.max_model_len"
    if error:
        return error, "See the log"
    if returncode in (-9, 137):
        return "killed by SIGKILL, perhaps for want of memory", "Lower rollout.kv_cache_gib, or free memory"
    if returncode is not None and returncode < 0:
        return f"ended by signal {-returncode}", "See the log"
    return f"ended with exit code {returncode}", "See the log"


def _root_error(log: str) -> str:
    """The last error in the log that is not the echo of another one."""
    found = ""
    for line in log.splitlines():
        match = _ERROR_LINE.search(line.rstrip()) or _VALIDATION_LINE.search(line.rstrip())
        if match and not any(echo in line for echo in _ECHOES):
            found = f"{match[1].rpartition('.')[2]}: {match[2]}"[:_SHOWN]
    return found
