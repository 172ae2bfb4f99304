"""The run's folder on the host of its trainer: what a checkpoint consists of, and how it comes here.

The trainer writes resume states there and only there reads them again: they are as large as the optimiser, and hold
DeepSpeed's pickles, which nobody else should load. The HF export and the manifest are fetched after each save; the
checkpoint counts once the manifest is here, since that is what the runner, a resume and the audit read.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import httpx

from nightshift.wire.errors import RoleError, RoleTimeoutError
from orchestrator.runner.checkpoints import MANIFEST
from orchestrator.runner.services import FilesAddress, TrainerAddress

_SILENCE_S = 30.0
_PAUSE_S = 0.5
#: Seconds for which the other host may be away.
_AWAY_S = 60.0


def files_of(address: TrainerAddress, run_dir: Path) -> TrainerFiles | None:
    """The files of a trainer on another host; None for one that writes into the run's folder itself."""
    return TrainerFiles(address.files, run_dir) if address.files else None


class TrainerFiles:
    """Reads and removes files of the run on another host.

    Args:
        run_dir: the run's folder here.
        away_s: how long the other host may be away.
    """

    def __init__(self, address: FilesAddress, run_dir: Path, away_s: float = _AWAY_S) -> None:
        self._address = address
        self._run_dir = run_dir
        self._away_s = away_s
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {address.token}"}, timeout=_SILENCE_S, trust_env=False
        )

    async def close(self) -> None:
        """Closes the connection."""
        await self._client.aclose()

    def there(self, folder: Path) -> str:
        """The path of a folder of the run on the other host."""
        return f"{self._address.root.rstrip('/')}/{self._relative(folder)}"

    async def fetch(self, state_dir: str, export_dir: str) -> None:
        """Brings the export here, and then the manifest of the resume state; each appears by rename.

        Raises:
            RoleError: a file is not there, or does not fit what the host says of it.
            RoleTimeoutError: the host was away for too long.
        """
        if export_dir:
            await self._fetch_folder(Path(export_dir), None)
        if state_dir:
            await self._fetch_folder(Path(state_dir), [MANIFEST])

    async def remove(self, folders: Sequence[Path]) -> None:
        """Removes folders of checkpoints there; harmless where they are gone already."""
        for folder in folders:
            await self._ask("DELETE", self._relative(folder))

    async def _fetch_folder(self, folder: Path, wanted: list[str] | None) -> None:
        listed = (await self._ask("GET", self._relative(folder))).json()["files"]
        part = folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")
        try:
            for item in listed:
                name, size = str(item["path"]), int(item["bytes"])
                target = part / name
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                    raise RoleError(f"the trainer's host names a file outside its folder: {name!r}", role="trainer")
                if wanted is None or name in wanted:
                    await self._fetch(f"{self._relative(folder)}/{name}", size, target)
            if wanted is not None and not {item["path"] for item in listed}.issuperset(wanted):
                raise RoleError(f"{self.there(folder)} lacks {wanted}", role="trainer")
            _put(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    async def _fetch(self, path: str, size: int, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        deadline, have = time.monotonic() + self._away_s, 0
        with target.open("wb") as out:
            while have < size or size == 0:
                headers = {"Range": f"bytes={have}-"} if have else {}
                try:
                    async with self._client.stream("GET", self._url(path), headers=headers) as answer:
                        self._check(answer.status_code, path, 206 if have else 200)
                        async for chunk in answer.aiter_bytes(1 << 20):
                            out.write(chunk)
                            have += len(chunk)
                            deadline = time.monotonic() + self._away_s
                    if size == 0:
                        break
                    cause = f"it ended after {have} of {size} bytes"
                except httpx.TransportError as error:
                    cause = str(error) or type(error).__name__
                if have < size:
                    if time.monotonic() > deadline:
                        raise self._away(path, cause)
                    await asyncio.sleep(_PAUSE_S)
        if have != size:
            raise RoleError(f"{self._url(path)} has {have} bytes, expected {size}", role="trainer")

    async def _ask(self, method: str, path: str) -> Any:
        deadline = time.monotonic() + self._away_s
        while True:
            try:
                answer = await self._client.request(method, self._url(path))
                self._check(answer.status_code, path, 200)
                return answer
            except httpx.TransportError as error:
                if time.monotonic() > deadline:
                    raise self._away(path, str(error) or type(error).__name__) from error
            await asyncio.sleep(_PAUSE_S)

    def _relative(self, folder: Path) -> str:
        return folder.resolve().relative_to(self._run_dir.resolve()).as_posix()

    def _url(self, path: str) -> str:
        return f"{self._address.url.rstrip('/')}/{quote(path)}"

    def _check(self, status: int, path: str, wanted: int) -> None:
        if status != wanted:
            raise RoleError(
                f"{self._url(path)} was answered with {status}, expected {wanted}",
                role="trainer",
                fix="See the log of the agent on the trainer's host",
            )

    def _away(self, path: str, cause: str) -> RoleTimeoutError:
        return RoleTimeoutError(f"{self._url(path)} was away for {self._away_s:g} s: {cause}", role="trainer")


def _put(part: Path, folder: Path) -> None:
    if folder.exists():  # of a save that was repeated
        shutil.rmtree(folder)
    part.rename(folder)
