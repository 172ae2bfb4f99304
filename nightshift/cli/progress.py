"""Drawing a run: a live view on a terminal, one line a step elsewhere, or the events as JSON lines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nightshift.cli.output import duration, print_json
from nightshift.cli.view import TOKENS_KEYS, RunView, first, role_sentence
from nightshift.wire.events import Event

_REFRESH_PER_S = 4
_ROLE_ORDER = ("rollout", "reward", "reference", "teacher", "critic", "trainer", "buffer", "orchestrator", "agent")
_SPARKS = "▁▂▃▄▅▆▇█"


class Progress(Protocol):
    """Shows a run while it goes on."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def show(self, event: Event) -> None:
        """Shows an event, which the view has taken in already."""

    def say(self, text: str) -> None:
        """Says something that comes from no event."""


def progress_for(view: RunView, console: Console, *, as_json: bool) -> Progress:
    """The way of drawing that fits the output."""
    if as_json:
        return JsonProgress()
    return LiveProgress(view, console) if console.is_terminal else PlainProgress(view, console)


class _Silent:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


class JsonProgress(_Silent):
    """Each event as one JSON line on stdout."""

    def show(self, event: Event) -> None:
        print_json(event)

    def say(self, text: str) -> None:
        print_json({"time": time.time(), "kind": "message", "message": text})


class PlainProgress(_Silent):
    """One line for each step, evaluation, change of a role and warning."""

    def __init__(self, view: RunView, console: Console) -> None:
        self._view = view
        self._console = console

    def show(self, event: Event) -> None:
        line = plain_line(event, self._view)
        if line is not None:
            self.say(line)

    def say(self, text: str) -> None:
        self._console.out(text, highlight=False)


class LiveProgress:
    """A view that is redrawn in place; warnings scroll by above it."""

    def __init__(self, view: RunView, console: Console) -> None:
        self._view = view
        self._console = console
        self._live = Live(
            console=console, refresh_per_second=_REFRESH_PER_S, get_renderable=lambda: render(self._view, time.time())
        )

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, event: Event) -> None:
        if event.get("kind") in ("warning", "checkpoint", "metrics") or event.get("state") in ("failed", "restarting"):
            line = plain_line(event, self._view)
            if line is not None:
                self.say(line)

    def say(self, text: str) -> None:
        self._console.print(Text(text))


def plain_line(event: Event, view: RunView) -> str | None:
    """One event as one line; None for what would only be noise."""
    match event.get("kind"):
        case "role":
            name = str(event.get("role") or "?")
            if event.get("state") == "failed":
                return f"failed: {role_sentence(name, view.roles[name])}"
            seconds = event.get("seconds")
            took = f" after {duration(float(seconds))}" if isinstance(seconds, int | float) else ""
            detail = f": {event['detail']}" if event.get("detail") else ""
            return f"{name}: {event.get('state')}{took}{detail}"
        case "job":
            return f"job: {event.get('state')}"
        case "step":
            return step_line(view)
        case "evaluation":
            scores = view.held_out()
            score = f"held-out {scores[-1][1]:.3f}" if scores else "held-out: no score"
            return f"evaluation at step {event.get('step')}: {score}"
        case "warning":
            return f"warning: {view.warnings[-1]}" if view.warnings else None
        case "checkpoint":
            return f"checkpoint: {event.get('path')}"
        case "metrics":
            return f"metrics: {event.get('url')}"
    return None


def step_line(view: RunView) -> str:
    """The last step as one line."""
    width = len(str(view.steps))
    parts = [f"step {view.step:>{width}}/{view.steps}", *figures(view.latest)]
    if view.seconds_per_step is not None:
        parts.append(f"{duration(view.seconds_per_step)} a step")
    if view.seconds_left:
        parts.append(f"{duration(view.seconds_left)} left")
    return "  ".join(parts)


def figures(metrics: Mapping[str, float | None]) -> list[str]:
    """The few figures of a step that a user looks at first; those that are missing are left out."""
    shown = (
        ("reward", metrics.get("reward/mean"), ".3f"),
        ("kl", metrics.get("kl"), ".2g"),
        ("grad norm", metrics.get("grad_norm"), ".2g"),
        ("length", metrics.get("response_length/mean"), ".1f"),
        ("staleness", metrics.get("staleness/max"), ".0f"),
        ("tokens/s", first(metrics, TOKENS_KEYS), ".0f"),
    )
    return [f"{name} {value:{form}}" for name, value, form in shown if value is not None]


def render(view: RunView, now: float) -> RenderableType:
    """The live view at unix time ``now``."""
    elapsed = duration(now - view.started) if view.started else ""
    head = Table.grid(padding=(0, 2), expand=False)
    bar = ProgressBar(total=max(1, view.steps), completed=view.step, width=36)
    left = f"about {duration(view.seconds_left)} left" if view.seconds_left else ""
    head.add_row(f"step {view.step}/{view.steps or '?'}", bar, elapsed, left)
    lines: list[RenderableType] = [Text(view.run_id, style="bold"), head]
    if view.done:
        rewards = view.rewards()
        text = "  ".join(figures(view.latest))
        lines.append(Text(f"{text}   {sparkline(rewards)}" if len(rewards) > 1 else text))
    if scores := view.held_out():
        shown = " -> ".join(f"{score:.3f}" for _, score in scores[-6:])
        lines.append(Text(f"held-out accuracy {shown}"))
    roles = Table.grid(padding=(0, 2))
    for name in sorted(view.roles, key=_rank):
        role = view.roles[name]
        style = {"failed": "red", "restarting": "yellow", "suspect": "yellow", "ready": "green"}.get(role.state, "dim")
        doing = role.doing or role.detail
        waited = f"{role.state} {duration(now - role.since)}" if role.state == "starting" and role.since else role.state
        roles.add_row(name, Text(waited, style=style), Text(doing, overflow="ellipsis", no_wrap=True))
    lines.append(roles)
    return Group(*lines)


def sparkline(values: list[float], width: int = 30) -> str:
    """The last values as small bars, scaled between their least and greatest."""
    values = values[-width:]
    if not values:
        return ""
    low, high = min(values), max(values)
    if high <= low:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[round((value - low) / (high - low) * (len(_SPARKS) - 1))] for value in values)


def _rank(name: str) -> tuple[int, str]:
    base = name.partition("-")[0]
    return (_ROLE_ORDER.index(base) if base in _ROLE_ORDER else len(_ROLE_ORDER), name)
