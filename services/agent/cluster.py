"""Ray on this machine, inside the agent's process tree and on loopback only."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from nightshift.wire.errors import RoleError
from services.agent import leftovers
from services.rollout import keeper

_REPOSITORY = Path(__file__).resolve().parents[2]
_MIB = 1 << 20
#: Programs without which a cluster is none.
_VITAL = ("gcs_server", "raylet")


class RayCluster:
    """A Ray cluster of one machine that ends with this process.

    :meth:`start` must be called from the main thread: the kernel ends Ray's processes when the thread that started them
    ends, and Ray sets a signal handler.
    """

    def __init__(
        self, run_dir: Path, *, cpus: int, gpus: int, object_store_mib: int, environment: Mapping[str, str]
    ) -> None:
        """Prepares a cluster.

        Args:
            cpus: Ray's logical ones: how many actors may run, not how many cores there are.
            gpus: CUDA devices that its actors may be given.
            environment: set before Ray is imported, and inherited by all of its processes.
        """
        self._logs = run_dir / "logs" / "ray"
        self._token = run_dir / "ray.token"
        self._cpus = cpus
        self._gpus = gpus
        self._object_store_mib = object_store_mib
        self._environment = dict(environment)
        #: host:port of Ray's own metrics, for Prometheus; known once it has started.
        self.metrics: list[str] = []
        self._folder: Path | None = None
        self._processes: dict[str, int] = {}

    def start(self) -> None:
        """Starts Ray.

        Raises:
            RoleError: it did not start.
        """
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        # Short: the paths of its sockets may have 107 characters.
        leftovers.remove_stale(Path(tempfile.gettempdir()), "ns-*")
        self._folder = Path(tempfile.mkdtemp(prefix="ns-"))
        leftovers.mark(self._folder)
        paths = [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ.pop("RAY_ADDRESS", None)  # or it would join another cluster
        os.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Workers at a low priority hardly get to start beside a busy server.
            "RAY_worker_niceness": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
            **self._environment,
        }
        import ray

        try:
            ray.init(
                address="local",
                num_cpus=self._cpus,
                num_gpus=self._gpus,
                object_store_memory=self._object_store_mib * _MIB,
                include_dashboard=False,
                log_to_driver=False,
                namespace="nightshift",
                _node_ip_address="127.0.0.1",
                _temp_dir=str(self._folder),
            )
        except Exception as error:
            raise RoleError(
                f"Ray did not start: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                role="agent",
                fix=f"See {self._logs}",
            ) from error
        self.metrics = [
            f"127.0.0.1:{node['MetricsExportPort']}" for node in ray.nodes() if node.get("MetricsExportPort")
        ]
        self._processes = {name: pid for pid in keeper.descendants(os.getpid()) if (name := _program(pid)) in _VITAL}

    def failure(self) -> str:
        """Why Ray cannot go on; empty where it can. Asks nothing of Ray, whose calls would wait for what is gone."""
        dead = [name for name, pid in self._processes.items() if _program(pid) != name]
        return f"Ray's process {dead[0]} has ended" if dead else ""

    def stop(self) -> None:
        """Ends Ray, keeps its logs in the run's folder, and removes its own folder. Harmless where it did not start."""
        import ray

        try:
            ray.shutdown()
        finally:
            self.clear()

    def clear(self) -> None:
        """Keeps the logs and removes the files."""
        self._token.unlink(missing_ok=True)
        if self._folder is None:
            return
        logs = self._folder / "session_latest" / "logs"
        if logs.is_dir():
            with contextlib.suppress(OSError, shutil.Error):
                ignore = shutil.ignore_patterns("old", "*.jsonl", "event*")
                shutil.copytree(logs, self._logs, dirs_exist_ok=True, ignore=ignore, ignore_dangling_symlinks=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


def _program(pid: int) -> str:
    """Name of the program that a process runs; "" for one that has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty for a zombie
    except OSError:
        return ""
    return Path(os.fsdecode(command.split(b"\0")[0])).name
