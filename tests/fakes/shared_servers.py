"""Fake rollout servers in a process of their own, for several jobs: they belong to none of them.

``python -m tests.fakes.shared_servers FOLDER COUNT TOKEN TOKEN_S`` prints their URLs as JSON and serves until ended.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.fakes.engine import FakeEngine
from tests.fakes.service import ROOT

TOKEN = "of-the-fleet"


class SharedServers:
    """The process, from outside.

    Args:
        folder: of their request logs.

    Attributes:
        servers: name and URL of each, as a fleet takes them.
    """

    def __init__(self, folder: Path, count: int, token_s: float = 0.002) -> None:
        self.folder = folder
        self._count = count
        self._token_s = token_s
        self._process: subprocess.Popen[str] | None = None
        self.servers: list[dict[str, str]] = []

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        arguments = [str(self.folder), str(self._count), TOKEN, str(self._token_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.shared_servers", *arguments],
            stdout=subprocess.PIPE, cwd=ROOT, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.servers = json.loads(self._process.stdout.readline())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


async def serve(folder: Path, count: int, token: str, token_s: float) -> None:
    """Serves until the process is ended."""
    engines = [FakeEngine(folder, f"s{at}", token_s=token_s, logs=folder) for at in range(count)]
    for engine in engines:
        await engine.start()
        engine.token, engine.keep = token, True
    print(json.dumps([{"name": engine.name, "url": engine.address["url"]} for engine in engines]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])))
