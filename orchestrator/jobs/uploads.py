"""Files that travel with submissions, kept by their SHA-256."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
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
        max_project_bytes: of all files of one project.
    """

    def __init__(self, folder: Path, max_bytes: int, max_project_bytes: int) -> None:
        self._folder = folder
        self.max_bytes = max_bytes
        self._max_project_bytes = max_project_bytes

    def find(self, project: str, digest: str) -> Path | None:
        """The file with this SHA-256, or None."""
        if not _HASH.fullmatch(digest):
            return None
        path = self._path(project, digest)
        return path if path.is_file() else None

    def receive(self, project: str, digest: str) -> Receiving:
        """Begins an upload.

        Raises:
            UploadError: the digest is none.
        """
        if not _HASH.fullmatch(digest):
            raise UploadError(f"{digest[:80]!r} is not a SHA-256 in 64 lower-case hexadecimal digits", 422)
        path = self._path(project, digest)
        room = self.max_bytes if path.exists() else self._room(project)
        return Receiving(path, digest, self.max_bytes, room)

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

    def _room(self, project: str) -> int:
        used = sum(path.stat().st_size for path in (self._folder / project).glob("??/*") if path.is_file())
        return self._max_project_bytes - used


class Receiving:
    """A file that comes in; it appears by rename, whole and checked, or not at all."""

    def __init__(self, path: Path, digest: str, max_bytes: int, room: int) -> None:
        self._path = path
        self._digest = digest
        self._max_bytes = max_bytes
        self._room = room
        self._hash = hashlib.sha256()
        self._size = 0
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
        if self._size > self._room:
            raise UploadError("the uploads of this project are full", 413, "Ask for old ones to be removed")
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
        return new

    def abort(self) -> None:
        """Removes what came in."""
        self._file.close()
        self._part.unlink(missing_ok=True)
