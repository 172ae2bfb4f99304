"""Files that travel with submissions, kept by their SHA-256."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from nightshift.wire.errors import NightshiftError

SCHEME = "upload:"
#: ``upload:<sha256>/<file name>``
REFERENCE = re.compile(r"upload:([0-9a-f]{64})/([A-Za-z0-9][A-Za-z0-9._-]{0,127})")
_HASH = re.compile(r"[0-9a-f]{64}")


class UploadError(NightshiftError):
    """An upload cannot be kept.

    Attributes:
        status: the HTTP status that fits.
    """

    def __init__(self, message: str, status: int, fix: str = "") -> None:
        super().__init__(message, role="job", fix=fix)
        self.status = status


class Uploads:
    """Content-addressed files of projects below one folder. A project sees its own alone.

    Args:
        folder: where they lie.
        max_bytes: of one file.
        max_project_bytes: of all files of one project, those that are coming in among them.
    """

    def __init__(self, folder: Path, max_bytes: int, max_project_bytes: int) -> None:
        self._folder = folder
        self.max_bytes = max_bytes
        self._max_project_bytes = max_project_bytes
        self._lock = threading.Lock()
        self._coming: dict[str, int] = {}  # uploads of a project that are coming in
        self._used: dict[str, int] = {}  # bytes of a project, while any are

    def sweep(self) -> None:
        """Removes what uploads left behind that a killed service had begun. Nothing may be coming in."""
        for part in self._folder.glob("*/??/.*"):
            part.unlink(missing_ok=True)

    def find(self, project: str, digest: str) -> Path | None:
        """The file with this SHA-256, or None."""
        if not _HASH.fullmatch(digest):
            return None
        path = self._path(project, digest)
        return path if path.is_file() else None

    def all(self, project: str) -> list[tuple[str, os.stat_result]]:
        """SHA-256 and status of a project's files, the newest first."""
        found = []
        for path in (self._folder / project).glob("??/[0-9a-f]*"):
            with contextlib.suppress(FileNotFoundError):  # removed a moment ago
                found.append((path.name, path.stat()))
        return sorted(found, key=lambda item: -item[1].st_mtime)

    def remove(self, project: str, digest: str) -> bool:
        """Removes a file; jobs that were submitted with it keep theirs. False: it is not there."""
        path = self.find(project, digest)
        if path is None:
            return False
        with self._lock, contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            if project in self._used:
                self._used[project] -= size
            return True
        return False

    def receive(self, project: str, digest: str) -> Receiving:
        """Begins an upload.

        Raises:
            UploadError: the digest is none.
        """
        if not _HASH.fullmatch(digest):
            raise UploadError(f"{digest[:80]!r} is not a SHA-256 in 64 lower-case hexadecimal digits", 422)
        path = self._path(project, digest)
        if path.exists():
            return Receiving(path, digest, self.max_bytes)
        self._begin(project)
        try:
            return Receiving(path, digest, self.max_bytes, functools.partial(self._take, project))
        except BaseException:
            self._take(project, 0, over=True)
            raise

    def place(self, path: Path, target: Path) -> None:
        """Puts a file where a job reads it; the upload may be removed afterwards."""
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            return
        try:
            os.link(path, target)
        except OSError:  # another file system, or one without links
            shutil.copyfile(path, target)

    def _path(self, project: str, digest: str) -> Path:
        return self._folder / project / digest[:2] / digest

    def _begin(self, project: str) -> None:
        with self._lock:
            if not self._coming.get(project):  # files may have come and gone by other hands
                self._used[project] = sum(stat.st_size for _, stat in self.all(project))
            self._coming[project] = self._coming.get(project, 0) + 1

    def _take(self, project: str, size: int, *, over: bool = False) -> bool:
        """Counts bytes of a project's upload, negative ones back; False where they have no room. ``over``: its last."""
        with self._lock:
            if size > 0 and self._used[project] + size > self._max_project_bytes:
                return False
            self._used[project] += size
            if over:
                self._coming[project] -= 1
                if not self._coming[project]:
                    del self._coming[project], self._used[project]
            return True


class Receiving:
    """A file that comes in; it appears by rename, whole and checked, or not at all.

    Args:
        take: counts bytes against what the project may have; None: the file is there already, and none are.
    """

    def __init__(self, path: Path, digest: str, max_bytes: int, take: Callable[..., bool] | None = None) -> None:
        self._path = path
        self._digest = digest
        self._max_bytes = max_bytes
        self._take = take
        self._hash = hashlib.sha256()
        self._size = self._taken = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._part = path.with_name(f".{digest}.{secrets.token_hex(4)}")
        self._file = self._part.open("wb")

    def write(self, data: bytes) -> None:
        """Takes the next bytes.

        Raises:
            UploadError: the file, or all files of the project together, become too large.
            OSError: the disk is full.
        """
        self._size += len(data)
        if self._size > self._max_bytes:
            raise UploadError(
                f"the file is larger than an upload may be ({self._max_bytes} bytes)",
                413,
                "Put large data where the service can read it, and name its path or URL in the job",
            )
        if self._take is not None:
            if not self._take(len(data)):
                raise UploadError(
                    "the uploads of this project are full",
                    413,
                    "Remove old ones (GET and DELETE /v1/uploads): jobs that were submitted with them keep theirs",
                )
            self._taken += len(data)
        self._hash.update(data)
        self._file.write(data)

    def finish(self) -> bool:
        """Keeps the file; False where it was there already.

        Raises:
            UploadError: the content has another hash.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        found = self._hash.hexdigest()
        if found != self._digest:
            self.abort()
            raise UploadError(f"the content has the SHA-256 {found}, not the one of its address", 422)
        new = not self._path.exists()
        self._part.chmod(0o444)
        self._part.replace(self._path)
        self._let_go(0 if new else self._taken)
        return new

    def abort(self) -> None:
        """Removes what came in."""
        self._file.close()
        self._part.unlink(missing_ok=True)
        self._let_go(self._taken)

    def _let_go(self, back: int) -> None:
        take, self._take, self._taken = self._take, None, 0
        if take is not None:
            take(-back, over=True)
