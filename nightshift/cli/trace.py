"""``nightshift trace``: the timeline of one prompt group, from its spans and the spans that link to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nightshift.cli.output import EXIT_DONE, duration, print_json, waiting
from nightshift.cli.runs import EVENTS, find_run, list_runs
from nightshift.wire.errors import BadInputError
from nightshift.wire.events import Event, read_events

#: Gaps shorter than this share of the whole timeline, or than this many seconds, are not shown.
_GAP_SHARE, _GAP_S = 0.01, 0.002
_SHOWN_ATTRIBUTES = 4


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a timeline. Times are in seconds, ``offset`` from the first span's start."""

    kind: str  # "span", "linked" (a span of another trace that links to this one) or "gap"
    name: str
    depth: int
    offset: float
    seconds: float
    role: str = ""
    status: str = ""
    span_id: str = ""
    trace_id: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)


def find_trace(events: Iterable[Event], prefix: str) -> list[str]:
    """The trace ids among the spans that begin with ``prefix``."""
    ids = {str(event.get("trace_id")) for event in events if event.get("kind") == "span"}
    return sorted(trace_id for trace_id in ids if trace_id.startswith(prefix.lower()))


def timeline(events: Iterable[Event], trace_id: str) -> list[Entry]:
    """The entries of one trace in reading order: parents before children, siblings by start, gaps between them."""
    own: dict[str, Event] = {}
    linked: dict[str, Event] = {}
    for event in events:
        if event.get("kind") != "span" or event.get("start") is None or event.get("end") is None:
            continue
        if event.get("trace_id") == trace_id:
            own[str(event["span_id"])] = event
        elif any(link.get("trace_id") == trace_id for link in event.get("links") or ()):
            linked[str(event["span_id"])] = event
    spans = [*own.values(), *linked.values()]
    if not spans:
        return []
    origin = min(float(span["start"]) for span in spans)
    whole = max(float(span["end"]) for span in spans) - origin
    children: dict[str | None, list[Event]] = {}
    for span in own.values():
        parent = span.get("parent_id")
        children.setdefault(parent if parent in own else None, []).append(span)
    least = max(_GAP_S, _GAP_SHARE * whole)
    return list(_level([*children.get(None, []), *linked.values()], children, origin, least, 0, linked.keys()))


def _level(
    spans: Sequence[Event],
    children: dict[str | None, list[Event]],
    origin: float,
    least: float,
    depth: int,
    linked: Iterable[str] = (),
    within: tuple[float, float] | None = None,
) -> Iterator[Entry]:
    """Entries of siblings, with the time between them that no sibling covers."""
    covered = within[0] if within else None
    for span in sorted(spans, key=lambda span: (float(span["start"]), float(span["end"]))):
        start, end = float(span["start"]), float(span["end"])
        if covered is not None and start - covered > least:
            yield Entry("gap", "unexplained", depth, covered - origin, start - covered)
        covered = end if covered is None else max(covered, end)
        is_linked = span["span_id"] in linked
        yield Entry(
            "linked" if is_linked else "span",
            str(span.get("name") or "?"),
            depth,
            start - origin,
            end - start,
            str(span.get("role") or ""),
            str(span.get("status") or ""),
            str(span["span_id"]),
            str(span["trace_id"]),
            dict(span.get("attributes") or {}),
        )
        if not is_linked and (below := children.get(str(span["span_id"]))):
            yield from _level(below, children, origin, least, depth + 1, within=(start, end))
    if within is not None and covered is not None and within[1] - covered > least:
        yield Entry("gap", "unexplained", depth, covered - origin, within[1] - covered)


def lines_of(entries: Sequence[Entry]) -> list[str]:
    """The timeline as text: offset, duration, name indented by parent, role, and the first attributes."""
    names = [f"{'  ' * entry.depth}{_label(entry)}" for entry in entries]
    width = max((len(name) for name in names), default=0)
    roles = max((len(entry.role) for entry in entries), default=0)
    lines = []
    for entry, name in zip(entries, names, strict=True):
        failed = "ERROR " if entry.status == "error" else ""
        extra = "  ".join(f"{key}={value}" for key, value in _shown(entry.attributes))
        line = (
            f"{'+' + duration(entry.offset):>14}  {duration(entry.seconds):>12}  {name:<{width}}  {entry.role:<{roles}}"
        )
        lines.append(f"{line}  {failed}{extra}".rstrip())
    return lines


def show_trace(trace_id: str, run: str | None, runs_dir: str, *, as_json: bool) -> int:
    """Prints one trace.

    Raises:
        BadInputError: no run knows the trace, or the beginning of the id fits several.
    """
    folders = [find_run(run, runs_dir)] if run is not None else list_runs(Path(runs_dir))
    for folder in folders:
        with waiting(f"looking through {folder.name}"):
            events = read_events(folder / EVENTS)
            found = find_trace(events, trace_id)
        if len(found) > 1:
            raise BadInputError(
                f"{trace_id!r} fits {len(found)} traces of the run {folder.name!r}: {', '.join(found[:5])}"
            )
        if found:
            print_trace(folder.name, found[0], timeline(events, found[0]), as_json=as_json)
            return EXIT_DONE
    where = f"the run {run!r}" if run is not None else f"any run below {runs_dir!r}"
    raise BadInputError(f"there is no trace {trace_id!r} in {where}", fix="`nightshift rollouts RUN` shows trace ids")


def print_trace(run_id: str, trace_id: str, entries: Sequence[Entry], *, as_json: bool) -> None:
    """Prints the timeline of a trace."""
    if as_json:
        print_json({"run_id": run_id, "trace_id": trace_id, "entries": [asdict(entry) for entry in entries]})
        return
    print(f"trace {trace_id} of {run_id}")
    for line in lines_of(entries):
        print(line)


def _label(entry: Entry) -> str:
    return {"gap": f"({entry.name})", "linked": f"-> {entry.name}"}.get(entry.kind, entry.name)


def _shown(attributes: dict[str, Any]) -> list[tuple[str, Any]]:
    plain = [(key, value) for key, value in attributes.items() if key != "job_trace_id" and not isinstance(value, list)]
    return plain[:_SHOWN_ATTRIBUTES]
