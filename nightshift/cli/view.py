"""What is known of a run from its events. Pure: fed with events, asked for numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nightshift.wire.events import Event

#: Names under which the held-out score may stand in an evaluation's metrics; the first that is there counts.
SCORE_KEYS = ("eval/accuracy", "eval/score", "accuracy", "score")
TOKENS_KEYS = ("response_tokens_per_second", "tokens_per_second")
_RECENT = 5


@dataclass(slots=True)
class RoleView:
    """The last that a role said."""

    state: str = ""
    detail: str = ""
    fix: str = ""
    since: float = 0.0
    doing: str = ""


@dataclass(slots=True)
class StepView:
    """One finished step."""

    step: int
    time: float
    metrics: dict[str, float | None]


@dataclass(slots=True)
class RunView:
    """The state of a run, from its events in order."""

    run_id: str = ""
    started: float | None = None
    job_state: str = ""
    error: str = ""
    steps: int = 0
    done: list[StepView] = field(default_factory=list)
    evaluations: list[StepView] = field(default_factory=list)
    roles: dict[str, RoleView] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    checkpoint: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    failed_role: str = ""
    #: Why the run failed as far as its processes show it; set from outside, and stronger than what events say.
    cause: str = ""
    #: When the time of the steps began to count: the last start or evaluation.
    _mark: float | None = None
    _durations: list[float] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        """Takes one event in; unknown kinds and missing fields are ignored."""
        at = float(event.get("time") or 0.0)
        self.run_id = event.get("run_id") or self.run_id
        if self.started is None and at:
            self.started = at
        match event.get("kind"):
            case "role":
                self._apply_role(event, at)
            case "job":
                self.job_state = str(event.get("state") or "")
                self.error = error_text(event.get("error")) if self.job_state == "failed" else ""
                if self.job_state == "running":
                    self._mark = at
                    if (orchestrator := self.roles.get("orchestrator")) is not None:
                        orchestrator.state = "ready"  # after a restart
            case "activity":
                self._role(event).doing = str(event.get("doing") or "")
            case "step":
                self._apply_step(event, at)
            case "evaluation":
                view = StepView(int(event.get("step") or 0), at, dict(event.get("metrics") or {}))
                self.evaluations = [old for old in self.evaluations if old.step < view.step] + [view]
                self._mark = at
            case "warning":
                role = event.get("role")
                text = str(event.get("message") or "")
                self.warnings.append(f"[{role}] {text}" if role and not text.startswith("[") else text)
            case "checkpoint":
                self.checkpoint = str(event.get("path") or "")
            case "summary":
                self.summary = {key: value for key, value in event.items() if key not in ("time", "kind", "run_id")}
            case "memory":
                self.memory = {"peak_mib": event.get("peak_mib"), "by_role": event.get("by_role") or {}}

    def _role(self, event: Event) -> RoleView:
        return self.roles.setdefault(str(event.get("role") or "?"), RoleView())

    def _apply_role(self, event: Event, at: float) -> None:
        view = self._role(event)
        view.state, view.since = str(event.get("state") or ""), at
        view.detail, view.fix = str(event.get("detail") or ""), str(event.get("fix") or "")
        if view.state == "failed":
            self.failed_role = str(event.get("role") or "?")
        elif view.state == "ready" and self.failed_role == event.get("role"):
            self.failed_role = ""

    def _apply_step(self, event: Event, at: float) -> None:
        step = int(event.get("step") or 0)
        self.steps = int(event.get("steps") or self.steps or 0)
        self.done = [old for old in self.done if old.step < step]  # a resumed run makes its last steps again
        self.done.append(StepView(step, at, dict(event.get("metrics") or {})))
        if self._mark is not None and at > self._mark:
            self._durations = [*self._durations, at - self._mark][-_RECENT:]
        self._mark = at

    # Asked by the drawing ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps finished."""
        return self.done[-1].step if self.done else 0

    @property
    def latest(self) -> Mapping[str, float | None]:
        """Metrics of the last step."""
        return self.done[-1].metrics if self.done else {}

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the last steps, evaluations left out; None before the first."""
        return sum(self._durations) / len(self._durations) if self._durations else None

    @property
    def seconds_left(self) -> float | None:
        """Time until the last step at the present pace; None while it is unknown."""
        pace = self.seconds_per_step
        return pace * max(0, self.steps - self.step) if pace is not None and self.steps else None

    @property
    def failure(self) -> str:
        """The sentence that says why the run failed: the job's own error, else that of the role that failed."""
        if self.cause or self.error:
            return self.cause or self.error
        role = self.roles.get(self.failed_role)
        return role_sentence(self.failed_role, role) if role is not None else ""

    def rewards(self) -> list[float]:
        """Mean reward of each step, where there is one."""
        values = (step.metrics.get("reward/mean") for step in self.done)
        return [value for value in values if value is not None]

    def held_out(self) -> list[tuple[int, float]]:
        """(step, held-out score) of each evaluation that has one."""
        scores = ((view.step, first(view.metrics, SCORE_KEYS)) for view in self.evaluations)
        return [(step, score) for step, score in scores if score is not None]


def first(metrics: Mapping[str, float | None], names: tuple[str, ...]) -> float | None:
    """The first of several metrics that is there."""
    return next((value for name in names if (value := metrics.get(name)) is not None), None)


def role_sentence(name: str, role: RoleView) -> str:
    """What a role said, with its name in front and the fix behind."""
    detail = role.detail or f"is {role.state or 'unknown'}"
    text = detail if detail.startswith("[") else f"[{name}] {detail}"
    return f"{text.rstrip('.')}. {role.fix}" if role.fix and role.fix not in text else text


def error_text(error: Any) -> str:
    """An error as one sentence: plain text, or the map that NightshiftError.to_dict makes."""
    if isinstance(error, Mapping):
        message = str(error.get("message") or error.get("type") or "")
        head = f"[{error['role']}] {message}" if error.get("role") and not message.startswith("[") else message
        return f"{head.rstrip('.')}. {error['fix']}" if error.get("fix") else head
    return str(error or "")
