"""O-47: what a long run holds does not grow."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.audit import audit
from tests.fakes.run import FakeRun


def resident(pid: int) -> int:
    """Resident memory of a process in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


async def test_o47_the_runner_needs_no_more_after_fifty_updates_than_after_ten(tmp_path: Path) -> None:
    """64 samples a step, some of them trained in parts, with a checkpoint every ten steps."""
    settings = {"rollout": {"batch_size": 16, "n": 4}, "trainer": {"micro_batch_size": 8, "save_freq": 10}}
    async with FakeRun(tmp_path, prompts=800, **settings) as run:
        process = await run.spawn()
        await run.until(lambda: len(run.updates) >= 10, "ten updates", 120.0)
        early = resident(process.pid)
        await run.until(lambda: len(run.updates) >= 50, "fifty updates", 240.0)
        late = resident(process.pid)
        assert await process.wait() == 0, run.error()
        audit(run, steps=50, staleness=1)
        # The case allows 5 %; forty steps whose groups were kept would come to 4 %.
        assert late <= 1.02 * early, f"{late / 2**20:.1f} MiB after {early / 2**20:.1f} MiB"
        assert not list((run.run_dir / "spool").iterdir())
        assert run.engine.running == 0
