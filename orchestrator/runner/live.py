"""Live settings of a run: looked for at each step boundary, put into force there, and told as events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from nightshift.config import JobSpec
from nightshift.config.live import DRAINED, LIVE, SettingsError, check_changes, get, put
from nightshift.wire.events import EventLog
from nightshift.wire.settings_file import APPLIED, ASKED, in_force, read_settings, write_settings
from orchestrator.runner.admission import Admission


class LiveSettings:
    """Changes the job of a run in place.

    Args:
        run_dir: the run's folder.
        spec: the job that all parts of the run read.
        events: where each change is told.
    """

    def __init__(self, run_dir: Path, spec: JobSpec, events: EventLog) -> None:
        self._run_dir = run_dir
        self._spec = spec
        self._events = events
        self._applied: dict[str, Any] = {}
        self._refused: dict[str, Any] = {}
        self._pending: dict[str, Any] = {}
        self._seen: tuple[int, int] | None = None

    @property
    def draining(self) -> bool:
        """Whether a change waits until nothing is in flight: no group of a further batch may start then."""
        return bool(self._pending)

    def restore(self) -> None:
        """Puts into force what was in force when the run ended the last time."""
        for key, value in in_force(self._run_dir).items():
            if key in LIVE:
                self._put(key, value)
                self._applied[key] = value

    async def boundary(
        self, step: int, in_flight: int, admission: Admission, commit: Callable[[], Awaitable[None]]
    ) -> bool:
        """Looks for changes between two steps; whether there was one.

        Args:
            step: steps made so far; a change takes effect with the next one.
            in_flight: groups that were started and are not trained.
            admission: told of another batch size or bound.
            commit: writes a checkpoint: no experience from before a drained change may come after it.
        """
        changes = self._news()
        self._pending |= {key: value for key, value in changes.items() if key in DRAINED}
        now = {key: value for key, value in changes.items() if key not in DRAINED}
        if self._pending and not in_flight:
            await commit()
            now |= self._pending
            self._pending = {}
        now = self._checked(now)
        for key, value in now.items():
            self._change(key, value, step)
        if now:
            admission.batch = self._spec.rollout.batch_size
            admission.max_staleness = self._spec.pipeline.max_staleness
            write_settings(self._run_dir / APPLIED, self._applied)
        return bool(changes or now)

    def limit(self, room: int, in_flight: int, batch: int) -> int:
        """Groups that may start: while a change waits, only what completes a batch."""
        return min(room, -in_flight % batch) if self._pending else room

    def _news(self) -> dict[str, Any]:
        """What was asked for and is neither in force nor on its way."""
        path = self._run_dir / ASKED
        try:
            stat = path.stat()
        except FileNotFoundError:
            return {}
        if (stat.st_mtime_ns, stat.st_ino) == self._seen:
            return {}
        self._seen = (stat.st_mtime_ns, stat.st_ino)
        asked = {key: value for key, value in read_settings(path).items() if key in LIVE}
        self._pending = {key: value for key, value in self._pending.items() if asked.get(key) == value}
        return {
            key: value
            for key, value in asked.items()
            if value != get(self._spec, key) and self._pending.get(key, ...) != value
            and self._refused.get(key, ...) != value
        }  # fmt: skip

    def _checked(self, changes: dict[str, Any]) -> dict[str, Any]:
        """The changes that the job can take: the service checked them, but the file is anybody's."""
        try:
            return check_changes(self._spec, changes) if changes else {}
        except SettingsError:
            found: dict[str, Any] = {}
        for key, value in changes.items():
            try:
                found |= check_changes(self._spec, {key: value})
            except SettingsError as error:
                self._refused[key] = value
                text = f"setting {key} = {str(value)[:80]} is refused: {error.message.splitlines()[0]}"
                self._events.append("warning", role="job", message=text)
        return found

    def _change(self, key: str, value: Any, step: int) -> None:
        old = get(self._spec, key)
        self._put(key, value)
        self._applied[key] = value
        self._events.append("setting", key=key, old=old, new=value, step=step + 1)

    def _put(self, key: str, value: Any) -> None:
        put(self._spec, key, value)
