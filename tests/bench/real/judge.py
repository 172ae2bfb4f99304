"""A remote judge: a scorer of its own that answers after so many seconds, and works for nobody meanwhile.

python -m tests.bench.real.judge --seconds 8       prints its address and answers until it is ended

The score is the demo's: 1 for the right answer, else 0. Calls do not wait for one another, as with a service that many
use.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import grpc

from nightshift.wire import codec
from nightshift.wire.v1 import scorer_pb2, scorer_pb2_grpc


class Judge(scorer_pb2_grpc.ScorerServiceServicer):
    """The service."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def Describe(self, request: Any, context: Any) -> Any:
        """What answers here."""
        return scorer_pb2.DescribeResponse(role="reward", model="judge", incarnation="bench")

    async def Score(self, request: Any, context: Any) -> Any:
        """Scores a batch, late."""
        await asyncio.sleep(self._seconds)
        results = [
            {
                "id": sample["id"],
                "score": float(sample["response"].strip() == sample.get("ground_truth")),
                "parts": {},
                "seconds": self._seconds,
                "error_type": "",
                "error": "",
            }
            for sample in codec.unpack(request.samples)
        ]
        return scorer_pb2.ScoreResponse(results=codec.pack(results), seconds=self._seconds, peak_memory_bytes=0)


async def serve(seconds: float) -> None:
    """Answers until it is cancelled."""
    server = grpc.aio.server()
    scorer_pb2_grpc.add_ScorerServiceServicer_to_server(Judge(seconds), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"grpc://127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    asyncio.run(serve(parser.parse_args().seconds))


if __name__ == "__main__":
    main()
