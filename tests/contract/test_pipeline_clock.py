"""A wall clock that is set forwards and backwards while a run goes on: its times are wrong then, and nothing else."""

from __future__ import annotations

import math
import random
import sys
import time
from pathlib import Path

import pytest

from nightshift.cli.main import main
from tests.fakes.audit import audit, balance
from tests.fakes.run import FakeRun


async def test_a_clock_that_jumps_moves_no_deadline_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, draw, off = time.time, random.Random(1), 0.0

    def jumping() -> float:
        nonlocal off
        # gRPC hands a moment of this clock to its core, which reads the machine's.
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("grpc"):
            return real()
        if draw.random() < 0.05:
            off = draw.choice([-1e7, -3600.0, -5.0, 0.0, 5.0, 3600.0, 1e7])
        return real() + off

    settings = {"pipeline": {"max_staleness": 2}, "trainer": {"save_freq": 2, "test_freq": 3}}
    async with FakeRun(tmp_path, prompts=24, test_prompts=2, token_s=0.002, **settings) as run:
        monkeypatch.setattr(time, "time", jumping)
        assert await run.run() == 0, run.error()
        monkeypatch.setattr(time, "time", real)
        audit(run, steps=12, staleness=2)
        assert balance(run) == {"issued": 24, "trained": 24}
        assert not run.warnings()
        for line in run.metrics():
            assert all(value is None or math.isfinite(value) for value in line["metrics"].values())
    for command in ("report", "ledger", "audit", "rollouts"):
        assert main([command, str(run.run_dir)]) == 0
        assert "Traceback" not in capsys.readouterr().err
