"""What every command prints with, and how an error ends one."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec

import typer

from nightshift.wire.errors import NightshiftError

P = ParamSpec("P")

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130
#: What a command of the service does most of the time.
WAITING = "waiting for the service"


def command(function: Callable[P, int | None]) -> Callable[P, None]:
    """Makes a command of a function that returns its exit code: errors become one sentence on stderr."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = function(*args, **kwargs) or EXIT_DONE
        except NightshiftError as error:
            fail(error)
            code = error.exit_code
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = EXIT_INTERRUPTED
        except BrokenPipeError:  # the reader of a pipe has seen enough
            sys.stdout = None
            code = EXIT_DONE
        raise typer.Exit(code)

    return wrapper


@contextmanager
def waiting(what: str, *, after_s: float = 2.0) -> Iterator[None]:
    """Within, says on a terminal what is under way and for how long, once that takes more than two seconds.

    It goes to stderr, and its line is gone at the end. Nothing may be printed within.

    Args:
        what: what is done, as "reading the run".
        after_s: seconds without a word.
    """
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield
        return
    done = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        width = 0
        while not done.wait(1.0 if width else after_s):
            text = f"{what}: {duration(time.monotonic() - began)}"
            print(f"\r{text:<{width}}", end="", file=stream, flush=True)
            width = max(width, len(text))
        if width:
            print(f"\r{'':<{width}}\r", end="", file=stream, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def fail(error: NightshiftError | str) -> None:
    """Prints an error to stderr, ended by exactly one full stop."""
    text = str(error).rstrip()
    print(f"error: {text}" if text.endswith((".", "?", "!")) or "\n" in text else f"error: {text}.", file=sys.stderr)


def print_json(value: Any) -> None:
    """Prints one JSON value on one line; what is not finite becomes null."""
    from nightshift.wire.events import plain

    print(json.dumps(plain(value), ensure_ascii=False), flush=True)


def duration(seconds: float) -> str:
    """A time as people read it: 850 ms, 12.3 s, 2 min 05 s, 1 h 02 min."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def mib(count: float) -> str:
    """Bytes as MiB or GiB."""
    size = count / (1 << 20)
    return f"{size:.0f} MiB" if size < 1024 else f"{size / 1024:.1f} GiB"
