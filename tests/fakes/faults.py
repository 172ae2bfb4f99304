"""What goes wrong, on request: each fault applies to the calls that it matches, a number of times.

Of the fake engine:

``faults`` of samples, by request id: ``503``, ``400``, ``drop`` (connection reset), ``hang``, ``late`` (answers
after ``delay`` even where nobody listens), ``slow``, ``abort``, ``wrong_id``, ``short_logprobs``, ``null_logprob``,
``positive_logprob``, ``zero_logprobs``, ``no_versions``, ``gap``, ``unknown_version``, ``null_version``,
``bad_finish``, ``unfinished`` (the answer ends and the response does not), ``done`` (``data: [DONE]``),
``strange_token`` (beyond the vocabulary), ``other_tokens`` (log-probs of others; JSON alone), ``empty``,
``not_json``, ``abort@n`` (after n tokens), ``cut@n`` (connection reset after n tokens, which have left where frames
are wanted), ``long@n`` (n tokens, however many were asked for), ``stall@n`` (waits for the second push from then on,
and aborts), ``behind@n`` (waits for it, and goes on), ``false_spans`` (vLLM's own count contradicts the frames).
``route_faults`` of all other calls, by path: ``500``, ``hang``, ``slow``, ``noop`` (of /update_weights, /sleep and
/wake_up: success without an effect), ``ignore_version`` (of /finish_weight_update).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Fault:
    """One fault.

    Attributes:
        kind: what happens; the fake service says which kinds it knows.
        match: text that the call's name (request id, path, application or method) must hold.
        times: calls that it applies to; None: all.
        skip: matching calls that are let through first.
        delay: seconds, for kinds that wait.
        when: a further condition on the call's record.
    """

    kind: str
    match: str = ""
    times: int | None = 1
    skip: int = 0
    delay: float = 0.0
    when: Callable[[Any], bool] | None = None
    used: int = 0

    def takes(self, name: str, record: Any) -> bool:
        """Whether this call gets the fault; counts it."""
        if self.match not in name or (self.when is not None and not self.when(record)):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None and self.used >= self.times:
            return False
        self.used += 1
        return True


class Faults(list[Fault]):
    """The faults of one service; the first that matches applies."""

    def plan(self, kind: str, match: str = "", **fields: Any) -> Fault:
        """Adds a fault."""
        fault = Fault(kind, match, **fields)
        self.append(fault)
        return fault

    def take(self, name: str, record: Any = None) -> Fault | None:
        """The fault of this call, if any."""
        return next((fault for fault in self if fault.takes(name, record)), None)
