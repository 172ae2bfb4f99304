"""Settings of the job service."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """All settings; sizes in bytes, times in seconds.

    Attributes:
        data_dir: database, runs and uploads; one service at a time uses it.
        database_url: SQLAlchemy URL; empty: ``state.db`` in the folder.
        require_token: False serves whoever reaches the port as an administrator: on loopback only.
        hosts: names by which a browser may reach a service without tokens; guards against DNS rebinding.
        allowed: folders of this machine whose files submissions may name.
        at_once: most jobs that run at one time.
        command: of a job's process; ``{job}`` and ``{folder}`` stand for its file and folder.
        grpc: address for gRPC, for example ``127.0.0.1:8701``; port 0: any free one; empty: none.
        requests_per_s: of one token, in the long run; ``burst`` at once.
        max_requests: most requests that are answered at one time, event streams included; further ones get 503.
        max_plans: processes that estimate jobs at one time; further plans wait for their turn.
        body_wait_s: for the next piece of a body or an upload, before the request ends with 408.
    """

    data_dir: Path
    database_url: str = ""
    require_token: bool = True
    hosts: frozenset[str] = frozenset({"127.0.0.1", "localhost", "[::1]"})
    allowed: Sequence[Path] = ()
    at_once: int = 1
    command: Sequence[str] = field(
        default_factory=lambda: [
            *(sys.executable, "-P", "-m", "nightshift.cli.main"),
            *("run", "{job}", "--resume", "{folder}", "--json"),
        ]
    )
    grpc: str = ""
    max_body: int = MIB
    max_upload: int = 256 * MIB
    max_project_uploads: int = 4096 * MIB
    requests_per_s: float = 500.0
    burst: int = 2000
    max_requests: int = 5000
    max_streams: int = 500
    body_wait_s: float = 60.0
    max_plans: int = 4
    tick_s: float = 0.5
    lease_s: float = 15.0
    weight_store: str = "/dev/shm"

    @property
    def url(self) -> str:
        """The database's URL."""
        return self.database_url or f"sqlite:///{self.data_dir / 'state.db'}"

    @property
    def runs_dir(self) -> Path:
        """Folder of the jobs' runs."""
        return self.data_dir / "runs"

    @property
    def owner_prefix(self) -> str:
        """Beginning of the names of orchestrators that use this folder, of which there is one at a time."""
        folder = hashlib.sha256(os.fsencode(self.data_dir.resolve())).hexdigest()[:12]
        return f"{socket.gethostname()}/{folder}/"
