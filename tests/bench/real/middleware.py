"""ASGI middleware in front of vLLM's server that forces the length of each response: for benches alone.

``rollout.extra_args=[--middleware,tests.bench.real.middleware.ForcedLengths]`` puts it outside the guard. The length
comes from the sample's name, so that every arm draws as many tokens of it; a response that goes on elsewhere gets
what is left of them. With ``NIGHTSHIFT_BENCH_FRAMES`` each token leaves as soon as it is seen, and the moments at
which tokens leave are written to that file, one ``unix-seconds sample`` a line.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from nightshift.wire import codec
from nightshift.wire.rollout import ROUTE
from services.rollout.asgi import read_body, replay
from tests.bench.real.lengths import VARIABLE, Lengths

FRAMES_VARIABLE = "NIGHTSHIFT_BENCH_FRAMES"
#: ``<run>.<group>.<slot>.<attempt>``; requests of an evaluation have no group.
_SAMPLE = re.compile(r"\.(g\d{7}\.\d+)\.\d+$")


class ForcedLengths:
    """The middleware. Without a distribution in the environment it only notes when tokens leave."""

    def __init__(self, app: Any) -> None:
        self._app = app
        text = os.environ.get(VARIABLE, "")
        self._lengths = Lengths.from_text(text) if text else None
        path = os.environ.get(FRAMES_VARIABLE, "")
        self._frames = Path(path).open("a", buffering=1) if path else None  # noqa: SIM115 open as long as the server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Changes what is asked for of a sample; passes everything else on."""
        if scope["type"] != "http" or (scope["method"], scope["path"]) != ("POST", ROUTE):
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        values = codec.unpack(body)
        sample = _SAMPLE.search(str(values.get("request_id")))
        if sample is not None:
            body = codec.pack(self._changed(values, sample[1]))
            if self._frames is not None:
                send = self._noting(send, sample[1])
        await self._app(scope, replay(body, receive), send)

    def _changed(self, values: dict[str, Any], sample: str) -> dict[str, Any]:
        changed = dict(values)
        if self._lengths is not None:
            drawn = self._lengths.longest - int(values["max_tokens"])
            changed |= {"max_tokens": max(1, self._lengths.of(sample) - drawn), "min_tokens": 0, "ignore_eos": True}
            changed["stop_token_ids"] = None
        if self._frames is not None:
            changed["flush_tokens"] = 1
        return changed

    def _noting(self, send: Any, sample: str) -> Any:
        async def noting(message: Any) -> None:
            if message["type"] == "http.response.body" and message.get("body"):
                self._frames.write(f"{time.time():.4f} {sample}\n")  # type: ignore[union-attr]
            await send(message)

        return noting
