"""Simulated time: real time that runs faster, or a loop that waits for nothing."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Clock:
    """Seconds of simulated time, of which ``factor`` pass in one second of the event loop."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def now(self) -> float:
        """Simulated seconds since any moment."""
        return asyncio.get_running_loop().time() * self.factor

    def later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Calls a function in so many simulated seconds."""
        return asyncio.get_running_loop().call_later(max(0.0, seconds) / self.factor, call)

    async def sleep(self, seconds: float) -> None:
        """Waits for so many simulated seconds."""
        await asyncio.sleep(max(0.0, seconds) / self.factor)


#: Nothing for so long is rather a wait for something outside (gRPC goes about its end in threads of its own).
_FAR_S, _FAR_GRACE_S = 30.0, 0.02


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when there is nothing else to do.

    Work takes no time on it: only timers do, so that simulated services are as fast as their model says however slow
    the machine is. Sockets of this process and threads of the loop's executors work as usual and are waited for; what
    other processes or threads send may come late.

    Args:
        tick_s: the clock stands on multiples of this alone, so that timers that lie close together fire together.
    """

    def __init__(self, tick_s: float = 0.001) -> None:
        self._virtual = 0.0
        self._tick_s = tick_s
        self._outside = 0
        super().__init__(_VirtualSelector(self))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual

    def jump(self, seconds: float) -> None:
        """Lets time pass."""
        due = self._virtual + seconds
        # Never short of the timer: it would be asked for again and again.
        self._virtual = max(due, math.ceil(due / self._tick_s - 1e-6) * self._tick_s)

    @property
    def outside(self) -> bool:
        """Whether something is under way that ends in real time."""
        return self._outside > 0

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """As in asyncio; time stands still until it has ended."""
        self._outside += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._returned)
        return future

    def _returned(self, _future: Any) -> None:
        self._outside -= 1


class _VirtualSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if self._loop.outside or timeout is None:
            return super().select(1.0)
        far = timeout > _FAR_S
        # Loopback delivers at once: a second look is enough.
        if not (events := super().select(_FAR_GRACE_S if far else 0)):
            self._loop.jump(min(timeout, _FAR_S))
        return events


def run_virtual(work: Coroutine[Any, Any, T], tick_s: float = 0.001) -> T:
    """Runs a coroutine on a virtual loop."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(tick_s)) as runner:
        return runner.run(work)
