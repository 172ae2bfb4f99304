"""The orchestrator with a simulated fleet: its own cost, and the throughput of its schedule beside the analytic bound.

``python -m tests.bench.bench_fleet PART [--out FILE]``, from the repository's folder. Parts:

``cores``   admission, plan of an update, ledger and refill alone, per prompt group, at 1,024 to 16,384 in flight.
``ratio``   synchronous and asynchronous steps at 256 engines and 16,384 prompt groups in flight, on a virtual clock.
``knee``    the same over staleness bounds, at a quarter of the size.
``streaming``  updates that begin with the groups that are ready beside those that wait for the whole batch, over
            bounds, at a sixteenth of the size. A part of an update costs what its tokens cost.
``cost``    the orchestrator in a process of its own, with HTTP, gRPC and SQL, on a scaled clock: CPU, memory. With
            ``--beside FOLDER`` the orchestrator of another checkout too, in turns, against the same services.
``table``   prints the results in FILE.

On a virtual clock computing takes no time, so that the schedule is measured and not this machine; requests go to the
simulated servers without sockets. On a scaled clock everything is real but the servers' work; the share of a core that
the orchestrator was busy says whether it was held back. The factor has to leave both processes time for the groups that
the fleet draws in a simulated second: where it does not, all of them come through each stage together, and the first
step comes after the last of them. Stages are balanced for the synchronous arm: a judge answers
after as long as generation of a batch takes, and so does the trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nightshift.algorithms.staleness import GroupAge, left_behind, plan_part
from nightshift.analysis.speedup import StageTimes, speedup, staleness_needed, step_seconds
from nightshift.wire.events import read_events
from orchestrator.runner.admission import Admission
from orchestrator.runner.ledger import GroupRecord, GroupState, Ledger
from tests.bench.fleet_parts import read
from tests.bench.process_sampler import Sampler
from tests.sim.alone import generate
from tests.sim.clock import run_virtual
from tests.sim.lengths import Lengths
from tests.sim.run import Scale, SimRun

#: Tokens of a prompt of the simulated jobs.
PROMPT_TOKENS = 40
BATCH, ENGINES, IN_FLIGHT = 2048, 256, 16_384
BOUNDS: tuple[int | None, ...] = (0, 1, 2, 4, 8, None)
#: Steps between which the pace is taken, and steps before them.
STEPS, WARM = 5, 2
TICK_S = 0.005
#: Takes samples of who holds the interpreter, and stops nobody for them.
PY_SPY = ["py-spy", "record", "--format", "raw", "--rate", "500", "--gil", "--nonblocking", "--output"]
PACKAGES = ("grpcio", "httptools", "sqlalchemy", "numpy", "uvloop")


# Stages by themselves -------------------------------------------------------------------------------------------------


def balanced(engines: int, batch: int, n: int, shorter: int = 1) -> tuple[Scale, StageTimes]:
    """A fleet whose judge and trainer take as long as generation, and its stages measured alone.

    Args:
        shorter: by which the lengths are divided.
    """
    usual = Lengths()
    lengths = Lengths(median=usual.median / shorter, sigma=usual.sigma, largest=usual.largest // shorter)
    scale = Scale(engines=engines, lengths=lengths)
    drawn = [
        generate(
            [f"g{group:07d}.{slot}.0" for group in range(at * batch, (at + 1) * batch) for slot in range(n)],
            PROMPT_TOKENS,
            engines,
            scale.speed,
            scale.lengths,
        )
        for at in range(3)
    ]
    seconds = statistics.fmean(one.seconds for one in drawn)
    tokens = statistics.fmean(one.tokens for one in drawn) + batch * n * PROMPT_TOKENS
    scale = Scale(engines=engines, lengths=lengths, score_s=seconds, train_token_s=seconds / tokens)
    times = StageTimes(
        generation=seconds,
        scoring=seconds,
        training=seconds,
        publication=scale.publish_s,
        pause=scale.load_s,
        occupancy=statistics.fmean(one.occupancy for one in drawn),
    )
    return scale, times


# On a virtual clock ---------------------------------------------------------------------------------------------------


def settings(
    batch: int, n: int, eta: int | None, steps: int, in_flight: int, *, streaming: bool = False
) -> dict[str, Any]:
    """A job's settings."""
    return {
        "rollout": {"batch_size": batch, "n": n, "flush_tokens": 1024},
        "trainer": {"total_steps": steps, "learning_rate": 1e-6, "save_minutes": None},
        "scorers": {"batch_samples": 8 * n},
        # Without a bound nothing but this holds the number in flight.
        "pipeline": {
            "max_staleness": eta,
            "streaming": streaming,
            "max_groups_in_flight": in_flight if eta is None else None,
        },
        "tracking": {"tensorboard": False, "rollouts": False},
    }


async def _virtual(scale: Scale, job: dict[str, Any]) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as folder:
        run = SimRun(Path(folder), scale, **job)
        with run.in_process():
            async with run:
                peak = 0

                async def watch(runner: Any) -> None:
                    nonlocal peak
                    while True:
                        await asyncio.sleep(0.5)
                        attempt = getattr(runner, "_attempt", None)
                        pipeline = getattr(attempt, "pipeline", None) or getattr(runner, "_pipeline", None)
                        if pipeline is not None:
                            peak = max(peak, len(pipeline.state.running) + len(pipeline.state.ready))

                code = await run.run(watch=watch, limit_s=1e7)
                if code:
                    raise RuntimeError(f"the run failed: {run.error()}")
                trainer = run.sim_trainer
                engines = [sim.model for sim in run.sims]
                return {
                    "applied": trainer.applied,
                    "ages": {str(age): tokens for age, tokens in sorted(trainer.ages.items())},
                    "samples": trainer.samples,
                    "twice": trainer.twice,
                    "peak_in_flight": peak,
                    "virtual_s": loop.time(),
                    "preemptions": sum(engine.preemptions for engine in engines),
                    "gap_s": statistics.median(gaps) if (gaps := [g for sim in run.sims for g in sim.gaps]) else None,
                }


def pace(applied: list[float], eta: int | None) -> float:
    """Seconds of a step: from the first update in the synchronous arm, after the warm-up otherwise."""
    warm = 0 if eta == 0 else WARM
    return (applied[-1] - applied[warm]) / (len(applied) - 1 - warm)


def arm(
    engines: int,
    batch: int,
    n: int,
    eta: int | None,
    in_flight: int,
    steps: int | None = None,
    *,
    streaming: bool = False,
) -> dict[str, Any]:
    """One run on a virtual clock, beside what the model says."""
    scale, times = balanced(engines, batch, n)
    steps = steps or (4 if eta == 0 else WARM + STEPS + 1)
    began, cpu = time.monotonic(), time.process_time()
    result = run_virtual(_virtual(scale, settings(batch, n, eta, steps, in_flight, streaming=streaming)), TICK_S)
    tokens = sum(result["ages"].values())
    late = 0 if eta is None else sum(count for age, count in result["ages"].items() if not 0 <= int(age) <= eta)
    return {
        **result,
        "engines": engines,
        "batch": batch,
        "samples_a_group": n,
        "eta": eta,
        "step_s": round(pace(result["applied"], eta), 3),
        "predicted_s": round(step_seconds(times, eta), 3),
        "bound": round(speedup(times, None), 4),
        "predicted_knee": staleness_needed(times),
        "generation_alone_s": round(times.generation, 3),
        "occupancy_alone": round(times.occupancy, 4),
        "trained_tokens": tokens,
        "tokens_beyond_bound": late,
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
    }


# Pure cores -----------------------------------------------------------------------------------------------------------


def cores(in_flight: int, rounds: int = 5) -> dict[str, Any]:
    """Milliseconds per prompt group that the decisions take, with so many groups in flight all the time."""
    eta = 7
    batch = in_flight // (eta + 1)
    values = []
    for _ in range(rounds):
        ledger, admission = Ledger(), Admission(eta, batch, 1_000_000)
        started: dict[int, int] = {}
        ready: dict[int, GroupAge] = {}
        versions: dict[int, int] = {}
        groups, began = 0, time.process_time()
        for step in range(eta + 3):
            for _ in range(admission.headroom(ledger.accepted, ledger.running)):
                index = ledger.issued
                ledger.issue(GroupRecord(index, index, 0, f"{index:032x}"))
                started[index] = step
                versions[step] = versions.get(step, 0) + 1
                groups += 1
            for index in list(started)[: batch + batch // 2]:
                ledger.move(index, GroupState.READY, oldest_version=f"run/0/{started[index]}")
                versions[started[index]] -= 1
                ready[index] = GroupAge(started.pop(index), index)
                # What the pipeline asks at each end of a group.
                admission.headroom(ledger.accepted, ledger.running)
            running = {version: count for version, count in versions.items() if count}
            plan = plan_part(step, ready.values(), running, places=batch, batch_size=batch, max_staleness=eta)
            assert len(plan.take) == batch
            for age in plan.take:
                del ready[age.order]
            left = [*ready.values(), *(GroupAge(version, index) for index, version in started.items())]
            assert not left_behind(step, left, batch_size=batch, max_staleness=eta)
            ledger.train((age.order for age in plan.take), step + 1, 0)
            ledger.check()
            admission.make_step(batch)
            admission.finish_step()
        values.append(1000 * (time.process_time() - began) / groups)
    return {"in_flight": in_flight, "ms_per_group": round(statistics.median(values), 4), "all": values}


# The whole orchestrator -----------------------------------------------------------------------------------------------


@contextmanager
def serving(folder: Path, scale: Scale, job: dict[str, Any]) -> Iterator[Path]:
    """Simulated services in a process of their own; yields the run's folder."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.sim.serve", str(folder), scale.to_json(), json.dumps(job)], stderr=sys.stderr
    )
    try:
        deadline = time.monotonic() + 120
        while not (found := list(folder.glob("runs/*/services.json"))):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the simulated services did not start within 120 s")
            time.sleep(0.1)
        yield found[0].parent
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def cost(
    engines: int,
    batch: int,
    n: int,
    eta: int,
    factor: float,
    steps: int,
    flush_tokens: int,
    files: int | None = None,
    tree: Path | None = None,
    shorter: int = 1,
    limit_s: float | None = None,
    profile: Path | None = None,
) -> dict[str, Any]:
    """A run with the orchestrator in a process of its own, which may open so many files; ``tree``: of that checkout.

    The services have a listener for each engine and a file for each connection of the orchestrator: where both have the
    same limit, theirs is reached first.

    Raises:
        RuntimeError: the run failed, or did not end within ``limit_s`` seconds; the message says how far it came.
    """
    scale, times = balanced(engines, batch, n, shorter)
    scale = Scale(**{**vars(scale), "factor": factor})
    job = settings(batch, n, eta, steps, 0)
    job["rollout"]["flush_tokens"] = flush_tokens
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(folder, scale, job) as run_dir:
            command = [sys.executable, "-m", "orchestrator.runner", "--run-dir", str(run_dir)]
            environment = {**os.environ, "PYTHONPATH": str(tree)} if tree else None
            process = subprocess.Popen(command, env=environment, cwd=tree)
            if files is not None:
                resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (files, files))
            sampler = Sampler(process.pid)
            sampler.start()
            spy = None if profile is None else subprocess.Popen([*PY_SPY, str(profile), "--pid", str(process.pid)])
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                events = read_events(run_dir / "events.jsonl")
                made = sum(event["kind"] == "step" for event in events)
                doing = {event["role"]: event["doing"] for event in events if event["kind"] == "activity"}
                raise RuntimeError(f"{made} of {steps} steps after {limit_s:g} s: {doing}") from None
            finally:
                process.kill()
            if spy is not None:
                spy.wait(60)
        events = read_events(run_dir / "events.jsonl")
        seen = json.loads((folder / "sim.json").read_text())
    if code:
        raise RuntimeError([event for event in events if event["kind"] == "job"][-1].get("error"))
    ends = [event["time"] for event in events if event["kind"] == "step"]
    first = next(event["time"] for event in events if event["kind"] == "job" and event.get("state") == "running")
    # From the first group to the last: each of them has gone the whole way in between.
    groups, spent = batch * len(ends), sampler.cpu_at(ends[-1]) - sampler.cpu_at(first)
    inside = [row for row in sampler.rows if first <= row[0] <= ends[-1]]
    base = max((row[2] for row in sampler.rows if row[0] <= first), default=0)
    late = sum(tokens for age, tokens in seen["ages"].items() if not 0 <= int(age) <= eta)
    return {
        "engines": engines,
        "batch": batch,
        "samples_a_group": n,
        "eta": eta,
        "in_flight": (eta + 1) * batch,
        "factor": factor,
        "flush_tokens": flush_tokens,
        "shorter": shorter,
        "groups": groups,
        "cpu_ms_per_group": round(1000 * spent / groups, 3),
        "busy_share": round(spent / (ends[-1] - first), 3),
        "first_step_wall_s": round(ends[0] - first, 1),
        "wall_s": round(ends[-1] - first, 1),
        "warnings": sum(event["kind"] == "warning" for event in events),
        "step_s": round(factor * (ends[-1] - ends[0]) / (len(ends) - 1), 2),
        "predicted_s": round(step_seconds(times, eta), 2),
        "memory_base_mib": round(base / 2**20, 1),
        "memory_peak_mib": round(max(row[2] for row in inside) / 2**20, 1),
        "files_peak": max(row[3] for row in sampler.rows),
        "trained_tokens": sum(seen["ages"].values()),
        "tokens_beyond_bound": late,
        "samples_twice": seen["twice"],
        "services_cpu_s": round(seen["cpu_s"], 1),
        "us_per_group": {part: round(1e6 * share * spent / groups) for part, share in read(profile).items()}
        if profile
        else None,
    }


# Command --------------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Where and when this was measured."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {
            name: importlib.metadata.version(name) for name in ("grpcio", "httptools", "sqlalchemy", "numpy", "uvloop")
        },
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def note(path: Path | None, part: str, key: str, value: dict[str, Any]) -> None:
    """Prints a result and puts it into the file beside the others."""
    print(json.dumps({part: {key: value}}), flush=True)
    if path is not None:
        results = json.loads(path.read_text()) if path.exists() else {}
        results.setdefault(part, {})[key] = value
        results.setdefault("environment", {})[part] = environment()
        path.write_text(json.dumps(results, indent=1))


def table(results: dict[str, Any]) -> str:
    """The results as text."""
    lines = []
    for name, value in results.get("cores", {}).items():
        lines.append(f"cores  {name:>6} in flight: {value['ms_per_group']:.4f} ms per group")
    for part in ("ratio", "knee"):
        arms = results.get(part, {})
        base = arms.get("0")
        for name, value in arms.items():
            gain = base["step_s"] / value["step_s"] if base else float("nan")
            lines.append(
                f"{part:<6} eta {name:>4}: {value['step_s']:8.2f} s a step, {gain:.3f} times synchronous (model "
                f"{value['predicted_s']:.2f} s; bound {value['bound']:.3f}, knee {value['predicted_knee']}), "
                f"{value['peak_in_flight']} in flight, {value['tokens_beyond_bound']} of {value['trained_tokens']} "
                "tokens beyond the bound"
            )
    for name, value in results.get("streaming", {}).items():
        lines.append(f"stream eta {name}: {value['step_s']:8.2f} s a step")
    for name, value in results.get("cost", {}).items():
        lines.append(
            f"cost   {name}: {value['cpu_ms_per_group']:.2f} ms per group, busy {value['busy_share']:.0%} of a core, "
            f"{value['memory_peak_mib']:.0f} MiB (base {value['memory_base_mib']:.0f}), {value['files_peak']} files, "
            f"{value['tokens_beyond_bound']} tokens beyond the bound"
        )
    return "\n".join(lines)


def _bound(text: str) -> int | None:
    return None if text == "none" else int(text)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["cores", "ratio", "knee", "streaming", "cost", "table"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--eta", type=_bound, nargs="*", help="only these bounds; 'none' for none")
    parser.add_argument("--engines", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--samples", type=int, help="of a prompt group")
    parser.add_argument("--factor", type=float, default=1.0, help="simulated seconds in a real one, of cost")
    parser.add_argument("--steps", type=int, help="fewer or more of them")
    parser.add_argument(
        "--files", type=int, help="that the orchestrator may open, of cost; default: what the system allows"
    )
    parser.add_argument("--flush-tokens", type=int, default=1024, help="of cost")
    parser.add_argument("--shorter", type=int, default=1, help="lengths divided by so much, of cost")
    parser.add_argument("--limit", type=float, help="seconds after which the orchestrator is ended, of cost")
    parser.add_argument(
        "--profile", type=Path, help="a file for py-spy's samples, of cost; the result says what goes where"
    )
    parser.add_argument("--beside", type=Path, help="another checkout, of cost")
    parser.add_argument("--rounds", type=int, default=1, help="of cost; the median is taken")
    options = parser.parse_args()
    if options.part == "cores":
        for in_flight in (1024, 4096, 16_384):
            note(options.out, "cores", str(in_flight), cores(in_flight))
    elif options.part in ("ratio", "knee"):
        small = options.part == "knee"
        engines = options.engines or (ENGINES // 4 if small else ENGINES)
        batch = options.batch or (BATCH // 4 if small else BATCH)
        bounds = BOUNDS if small else (0, IN_FLIGHT // BATCH - 1)
        for eta in options.eta or bounds:
            value = arm(engines, batch, options.samples or 2, eta, 8 * batch, options.steps)
            note(options.out, options.part, "none" if eta is None else str(eta), value)
    elif options.part == "streaming":
        engines, batch = options.engines or ENGINES // 16, options.batch or BATCH // 16
        for eta in options.eta or (0, 1, 2):
            for streaming in (False, True):
                value = arm(
                    engines, batch, options.samples or 4, eta, 8 * batch, options.steps or 12, streaming=streaming
                )
                note(options.out, "streaming", f"{eta}, {'streamed' if streaming else 'whole batches'}", value)
    elif options.part == "cost":
        engines, batch = options.engines or ENGINES, options.batch or BATCH
        (eta,) = options.eta or (7,)
        n, steps, flush = options.samples or 4, options.steps or 4, options.flush_tokens
        trees = {"": None, **({", beside": options.beside.resolve()} if options.beside else {})}
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
        for _ in range(options.rounds):
            for name, tree in trees.items():
                value = cost(
                    engines,
                    batch,
                    n,
                    eta,
                    options.factor,
                    steps,
                    flush,
                    options.files,
                    tree,
                    options.shorter,
                    options.limit,
                    None if tree else options.profile,
                )
                print(json.dumps(value), flush=True)
                rounds[name].append(value)
        for name, values in rounds.items():
            middle = sorted(values, key=lambda value: value["cpu_ms_per_group"])[len(values) // 2]
            middle = {**middle, "all": [value["cpu_ms_per_group"] for value in values]}
            note(options.out, "cost", f"{middle['in_flight']} in flight, flush {flush}{name}", middle)
    else:
        print(table(json.loads(options.out.read_text())))


if __name__ == "__main__":
    main()
