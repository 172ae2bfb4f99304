"""Fetches a published weight file by HTTP into a folder of the server's own. No torch and no vLLM here.

The file's name, size and BLAKE3 come with the update, from the trainer; what does not fit them never appears under the
file's name. A connection that breaks is taken up where it broke off.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from blake3 import blake3

from services.rollout.weights import WeightFileError

#: From where weights may be fetched: addresses in front of which a client's address must begin, separated by spaces.
URL_VARIABLE = "NIGHTSHIFT_WEIGHT_URL"
#: Where they are kept; without it, a folder of this user's below the folder for temporary files.
CACHE_VARIABLE = "NIGHTSHIFT_WEIGHT_CACHE"

_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*\.safetensors")
_CHUNK = 1 << 20
#: Seconds without a byte after which a connection counts as broken, and between two attempts.
_SILENCE_S = 20.0
_PAUSE_S = 0.5
_DEADLINE_S = 1800.0
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class Source:
    """A weight server.

    Attributes:
        url: address of the folder of files.
        token: bearer token.
    """

    url: str
    token: str


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the trainer describes it."""

    name: str
    size: int  # bytes
    digest: str  # BLAKE3, hex


def source(url: str, token: str) -> Source:
    """The weight server that a client names, if this server may fetch from there.

    Raises:
        WeightFileError: it is none of the addresses that this server was started with.
    """
    allowed = os.environ.get(URL_VARIABLE, "").split()
    wanted = urlsplit(url)
    for prefix in map(urlsplit, allowed):
        same = (prefix.scheme, prefix.hostname) == (wanted.scheme, wanted.hostname)
        if same and prefix.port in (None, wanted.port) and wanted.path.startswith(prefix.path):
            return Source(url.rstrip("/"), token)
    if not allowed:
        raise WeightFileError(f"weights were to come from {url}, but the server was started without {URL_VARIABLE}")
    raise WeightFileError(f"weights were to come from {url}, but {URL_VARIABLE} allows {' '.join(allowed)} alone")


def remote_file(info: dict[str, Any]) -> RemoteFile:
    """The file of an update.

    Raises:
        WeightFileError: its name, size or digest is missing or cannot be.
    """
    name, size, digest = info.get("path"), info.get("bytes"), info.get("digest")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise WeightFileError(f"weight file {name!r} has a name that none can have")
    if not isinstance(size, int) or not isinstance(digest, str) or len(digest) != 64:
        raise WeightFileError(f"weight file {name} comes by HTTP without its size or its BLAKE3")
    return RemoteFile(name, size, digest.lower())


def cache_folder() -> Path:
    """The folder of fetched files; made where it does not exist.

    Raises:
        WeightFileError: others can write to it.
    """
    named = os.environ.get(CACHE_VARIABLE)
    folder = Path(named or Path(tempfile.gettempdir()) / f"nightshift-weights-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise WeightFileError(f"the folder {folder} for weight files belongs to others; set {CACHE_VARIABLE}")
    return folder


def fetch(source: Source, file: RemoteFile, folder: Path, deadline_s: float = _DEADLINE_S) -> Path:
    """Fetches a file, unless it is there already; removes the other ones.

    Several processes may ask for the same file at once: one of them fetches it.

    Raises:
        WeightFileError: the server refuses or does not have it, it is not what the trainer described, or it did not
            come within ``deadline_s``.
    """
    path = folder / file.name
    with _alone(folder):
        if path.is_file() and path.stat().st_size == file.size and _digest(path) == file.digest:
            return path
        for other in folder.glob("*.safetensors"):
            other.unlink(missing_ok=True)
        part = folder / f".{file.name}.part"
        try:
            _download(source, file, part, time.monotonic() + deadline_s)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return path


def _download(source: Source, file: RemoteFile, part: Path, deadline: float) -> None:
    url = f"{source.url}/{file.name}"
    hasher = blake3(max_threads=1)  # the server's other threads may not take a second core
    have = 0
    trust = urlsplit(url).hostname not in _LOOPBACK
    with part.open("wb") as out, httpx.Client(timeout=_SILENCE_S, trust_env=trust, follow_redirects=False) as client:
        while have < file.size:
            headers = {"Authorization": f"Bearer {source.token}"} | ({"Range": f"bytes={have}-"} if have else {})
            try:
                with client.stream("GET", url, headers=headers) as answer:
                    _check_status(answer.status_code, 206 if have else 200, url)
                    for chunk in answer.iter_raw(_CHUNK):
                        have += len(chunk)
                        if have > file.size:
                            raise WeightFileError(f"weight file {url} has more than {file.size} bytes")
                        hasher.update(chunk)
                        out.write(chunk)
                        if time.monotonic() > deadline:
                            raise TimeoutError
                cause = f"it ended after {have} of {file.size} bytes"
            except (httpx.HTTPError, TimeoutError) as error:
                cause = str(error) or type(error).__name__
            if have < file.size:
                if time.monotonic() + _PAUSE_S > deadline:
                    raise WeightFileError(f"weight file {url} did not come in time: {cause}")
                time.sleep(_PAUSE_S)
    if (found := hasher.hexdigest()) != file.digest:
        raise WeightFileError(f"weight file {url} is corrupt: BLAKE3 {found}, expected {file.digest}")


def _check_status(status: int, wanted: int, url: str) -> None:
    if status == wanted:
        return
    if status in (401, 403):
        raise WeightFileError(f"the weight server refuses the token for {url}")
    if status == 404:
        raise WeightFileError(f"weight file {url} does not exist on the weight server")
    if status >= 500:
        raise httpx.HTTPError(f"{url} was answered with {status}")
    raise WeightFileError(f"{url} was answered with {status}, expected {wanted}")


def _digest(path: Path) -> str:
    return str(blake3(max_threads=1).update_mmap(path).hexdigest())


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Within, no other process fetches into the folder."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
