"""A call that may take long or never return, kept out of the way of the caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from nightshift.wire.errors import RoleTimeoutError


class Background:
    """A call in a daemon thread, whose result or error is waited for with a deadline."""

    def __init__(self, what: str, call: Callable[[], Any]) -> None:
        self.what = what
        self._call = call
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the call has ended."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """What the call raised; None where it has not, or not yet."""
        return self._error

    def start(self, when_done: Callable[[], None] | None = None) -> None:
        """Starts the call."""
        threading.Thread(target=self._run, args=(when_done,), name=self.what, daemon=True).start()

    def wait(self, deadline: float) -> Any:
        """The result; what the call raised is raised here.

        Raises:
            RoleTimeoutError: it has not ended by ``deadline`` (monotonic seconds).
        """
        if not self._done.wait(max(0.0, deadline - time.monotonic())):
            raise RoleTimeoutError(f"{self.what} did not come to an end in time", role="agent")
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self, when_done: Callable[[], None] | None) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        self._done.set()
        if when_done:
            when_done()
