"""Metrics of the runs below a service, in one answer: their processes listen on loopback, where Prometheus is not."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from nightshift.wire.metrics import RUN_LABEL
from orchestrator.api.metrics import TARGETS

_log = logging.getLogger(__name__)
_LOOPBACK = "127.0.0.1"
_AT_ONCE = 8


def run_expositions(runs_dir: Path, timeout_s: float = 3.0) -> list[bytes]:
    """What the runners, vLLM servers and Ray of all runs export now, each series with its run and job.

    One that does not answer in time is left out: a run that has just ended is no fault.
    """
    targets = list(_targets(runs_dir / TARGETS))
    if not targets:
        return []
    with httpx.Client(trust_env=False, timeout=timeout_s) as client, ThreadPoolExecutor(_AT_ONCE) as threads:
        return [text for text in threads.map(lambda target: _scrape(client, *target), targets) if text]


def with_labels(exposition: bytes, labels: dict[str, str]) -> bytes:
    """A classic exposition with labels added to every sample that does not name the run itself."""
    added = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return b"\n".join(_labelled(line, added.encode()) for line in exposition.split(b"\n"))


def _labelled(line: bytes, added: bytes) -> bytes:
    if not line or line.startswith(b"#"):
        return line
    name, brace, rest = line.partition(b"{")
    if brace and b" " not in name:
        # A run's own name of itself stands, and so does its order of labels.
        return line if f'{RUN_LABEL}="'.encode() in rest else name + b"{" + added + b"," + rest
    name, _, value = line.partition(b" ")
    return name + b"{" + added + b"} " + value


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _targets(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """(address, labels) of each process that a run names; addresses beyond loopback are not asked."""
    for file in sorted(folder.glob("*.json")):
        try:
            groups = json.loads(file.read_text())
            for group in groups:
                labels = {RUN_LABEL: str(group["labels"][RUN_LABEL]), "job": str(group["labels"]["job"])}
                for address in group["targets"]:
                    if str(address).startswith(f"{_LOOPBACK}:"):
                        yield str(address), labels
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s does not say where a run can be scraped: %r", file, error)


def _scrape(client: httpx.Client, address: str, labels: dict[str, str]) -> bytes:
    try:
        answer = client.get(f"http://{address}/metrics")
    except httpx.HTTPError:
        return b""
    return with_labels(answer.content, labels) if answer.status_code == 200 else b""
