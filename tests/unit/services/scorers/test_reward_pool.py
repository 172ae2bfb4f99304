import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from nightshift.wire.errors import BadInputError, RoleError, RoleTimeoutError
from services.scorers.reward_pool import RewardPool, check

LIMIT_S = 0.6
SOURCE = """
import os, signal, subprocess, sys, time

def score(response, ground_truth=None):
    if response == "raises":
        raise ValueError("no luck with " + response)
    if response == "sleeps":
        time.sleep(3600)
    if response == "alarm":
        signal.signal(signal.SIGALRM, lambda *_: time.sleep(3600))
        signal.alarm(1)
        while True:
            time.sleep(10)
    if response == "own alarm":
        def ring(*_):
            raise TimeoutError("my own limit")
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(10)
    if response == "alarm left behind":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return 1.0
    if response == "naps":
        time.sleep(0.1)
    if response == "spins":
        while True:
            pass
    if response == "ignores signals":
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        time.sleep(3600)
    if response == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if response == "child":
        subprocess.run(["sleep", "3600"])
    if response == "exits":
        sys.exit(0)
    if response == "ends":
        os._exit(7)
    if response == "aborts":
        os.abort()
    if response == "closes":
        os.closerange(0, 256)
        return 1.0
    if response == "prints":
        print("x" * 100_000, flush=True)
        sys.__stdout__.write("more")
        os.write(1, b"raw bytes")
        return len(sys.stdin.read())
    if response == "pid":
        return os.getpid()
    return 0.5
"""


def samples(*responses: str) -> list:
    return [
        {
            "id": f"g.{index}",
            "prompt": "p",
            "response": response,
            "response_ids": np.array([1, 2], dtype=np.int32),
            "ground_truth": "4",
            "data_source": None,
            "extra_info": {"rows": [1, 2.5, "x"]},
            "finish_reason": "stop",
        }
        for index, response in enumerate(responses)
    ]


@contextmanager
def pool_of(folder: Path, source: str = SOURCE, **options):
    path = folder / "reward.py"
    path.write_text(source)
    pool = RewardPool(f"{path}:score", **{"timeout_s": LIMIT_S, **options})
    pool.start()
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Two workers; shared, since every test must leave it at full size."""
    with pool_of(tmp_path_factory.mktemp("reward"), workers=2) as pool:
        yield pool


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)


def error_types(results) -> list[str]:
    return [result["error_type"] for result in results]


def test_results_come_in_order_with_their_ids(pool):
    results = pool.score(samples(*["naps", "fine"] * 10))
    assert [result["id"] for result in results] == [f"g.{index}" for index in range(20)]
    assert all(result["score"] == 0.5 and result["error"] == "" for result in results)
    assert all(result["seconds"] > 0.09 for result in results[::2])


def test_an_empty_batch_has_no_results(pool):
    assert pool.score([]) == []


def test_o35_each_misbehaviour_is_unscored_by_its_type_and_the_pool_keeps_its_size(pool):
    names = ["raises", "sleeps", "alarm", "spins", "ignores signals", "stops", "exits", "ends", "aborts", "fine"]
    began = time.monotonic()
    results = pool.score(samples(*names))
    assert time.monotonic() - began < 120, "what sleeps for an hour held up the batch"
    by_name = dict(zip(names, results, strict=True))
    assert by_name.pop("fine")["score"] == 0.5
    assert all(result["score"] is None for result in by_name.values())
    timed_out = {name for name, result in by_name.items() if result["error_type"] == "timeout"}
    assert timed_out == {"sleeps", "alarm", "spins", "ignores signals", "stops"}
    assert {result["error_type"] for name, result in by_name.items() if name not in timed_out} == {"raised"}
    assert by_name["raises"]["error"].endswith("ValueError: no luck with raises")
    assert by_name["ends"]["error"] == "function score ended its process (exit code 7)"
    assert by_name["aborts"]["error"] == "function score ended its process (signal SIGABRT)"
    assert by_name["spins"]["error"] == "function score gave no result within 0.6 s"
    assert [result["score"] for result in pool.score(samples("fine", "fine"))] == [0.5, 0.5]
    wait_until(lambda: len(pool.worker_pids) == 2)


def test_o35_a_batch_of_eight_that_hangs_ends_within_the_limit_with_one_worker(tmp_path):
    with pool_of(tmp_path, workers=1, timeout_s=2.5) as pool:
        began = time.monotonic()
        results = pool.score(samples(*["sleeps"] * 8))
        assert time.monotonic() - began < 8 * 2.5, "they ended one after another"
        assert error_types(results) == ["timeout"] * 8
        assert [result["score"] for result in pool.score(samples("fine"))] == [0.5]
        wait_until(lambda: len(pool.worker_pids) == 1)


def test_one_hanging_sample_does_not_hold_up_the_others(tmp_path):
    with pool_of(tmp_path, workers=1, timeout_s=LIMIT_S) as pool:
        results = pool.score(samples("sleeps", *["fine"] * 7))
    assert error_types(results) == ["timeout", *[""] * 7]


def test_a_steady_function_never_gets_more_workers_than_it_asked_for(tmp_path):
    with pool_of(tmp_path, workers=1, timeout_s=5.0) as pool:
        first = pool.worker_pids
        assert len({result["score"] for result in pool.score(samples(*["pid"] * 5, *["naps"] * 3))}) == 2
        assert pool.worker_pids == first


def test_o35_an_alarm_of_the_functions_own_works_and_does_not_reach_the_next_sample(pool):
    assert "my own limit" in pool.score(samples("own alarm"))[0]["error"]
    results = pool.score(samples("alarm left behind", "alarm left behind", *["naps"] * 4))
    assert error_types(results) == [""] * 6


def test_o35_printing_and_reading_do_not_touch_the_protocol(pool):
    results = pool.score(samples("prints", "fine"))
    assert [result["score"] for result in results] == [0.0, 0.5]


def test_closing_every_file_costs_only_that_sample(pool):
    results = pool.score(samples("closes", "fine", "fine"))
    assert error_types(results) == ["raised", "", ""]


def test_o35_a_child_process_of_the_function_ends_with_it(pool):
    before = set(pool.worker_pids)
    future = pool.submit(samples("child"))
    children: list[int] = []

    def found() -> bool:
        for pid in before:
            children.extend(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return bool(children)

    wait_until(found)
    assert error_types(future.result(60)) == ["timeout"]
    wait_until(lambda: not any(alive(child) for child in children))


def test_a_worker_that_was_killed_while_idle_is_replaced(pool):
    victim = int(pool.score(samples("pid"))[0]["score"])  # one that has answered: others may still be starting
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: victim not in pool.worker_pids and len(pool.worker_pids) == 2)
    assert pool.score(samples("fine"))[0]["score"] == 0.5


def test_a_new_worker_runs_what_the_job_began_with(tmp_path):
    with pool_of(tmp_path, workers=1) as pool:
        (tmp_path / "reward.py").write_text("def score(response):\n    return -1.0")
        assert error_types(pool.score(samples("ends", "fine"))) == ["raised", ""]
        assert pool.score(samples("fine"))[0]["score"] == 0.5


def test_a_worker_that_cannot_be_started_again_is_reported_and_never_tried_without_end(tmp_path):
    flag = tmp_path / "flag"
    source = f"import os\nif os.path.exists({str(flag)!r}):\n    raise OSError('gone')\n{SOURCE}"
    with pool_of(tmp_path, source, workers=1) as pool:
        flag.touch()
        results = pool.score(samples("ends", "fine", "fine"))
        assert error_types(results) == ["raised"] * 3
        assert "OSError: gone" in results[2]["error"]
        flag.unlink()
        assert pool.score(samples("fine"))[0]["score"] in (0.5, None)  # the first one may meet the last failure
        assert pool.score(samples("fine"))[0]["score"] == 0.5


def test_closing_leaves_no_process_and_fails_what_waits(tmp_path):
    with pool_of(tmp_path, workers=2, timeout_s=60.0) as pool:
        pids = pool.worker_pids
        waiting = pool.submit(samples("sleeps", "sleeps", "sleeps"))
        pool.close()
        assert not any(alive(pid) for pid in pids)
        with pytest.raises(RoleError, match="closed"):
            waiting.result(5)
        with pytest.raises(RoleError, match="closed"):
            pool.submit(samples("fine"))


def test_a_function_that_cannot_be_used_is_refused_at_the_start(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("import nothing_of_this_name")
    with pytest.raises(BadInputError, match="ModuleNotFoundError") as caught:
        check(f"{path}:score")
    assert caught.value.role == "reward"
    assert caught.value.fix
    path.write_text("import os; os._exit(3)")
    with pytest.raises(BadInputError, match=r"ended while it imported .*reward.py \(exit code 3\)"):
        check(f"{path}:score")
    path.write_text("import time; time.sleep(3600)")
    with pytest.raises(RoleTimeoutError, match=r"waited 0\.5 s for a worker to import"):
        check(f"{path}:score", timeout_s=0.5)


def test_memory_is_that_of_the_workers(pool):
    assert 2 * 5e6 < pool.peak_memory_bytes < 2 * 1e9


def test_a_batched_function_gets_lists_and_answers_for_each_sample(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "async def score(response, ground_truth):\n"
        "    assert isinstance(response, list)\n"
        "    return [None if r == 'skip' else {'score': len(r), 'n': len(response)} for r in response]\n"
    )
    pool = RewardPool(f"{tmp_path / 'reward.py'}:score", timeout_s=5)
    pool.start()
    try:
        samples = [{"id": f"g.{at}", "response": text} for at, text in enumerate(["a", "skip", "ccc"])]
        results = pool.submit_batch(samples).result(20)
        assert [result["id"] for result in results] == ["g.0", "g.1", "g.2"]
        assert [result["score"] for result in results] == [1.0, None, 3.0]
        assert results[1]["error_type"] == "none"
        assert results[0]["parts"] == {"n": 3.0}
        assert pool.submit_batch([]).result(1) == []
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("return [1.0]", "type"),
        ("return 1.0", "type"),
        ("raise KeyError('x')", "raised"),
        ("while True: pass", "timeout"),
    ],
)
def test_o35_a_batched_call_that_fails_leaves_all_its_samples_unscored(tmp_path: Path, body: str, kind: str) -> None:
    (tmp_path / "reward.py").write_text(f"def score(response):\n    {body}\n")
    pool = RewardPool(f"{tmp_path / 'reward.py'}:score", timeout_s=1)
    pool.start()
    try:
        results = pool.submit_batch([{"id": f"g.{at}", "response": "x"} for at in range(2)]).result(20)
        assert [(result["score"], result["error_type"]) for result in results] == [(None, kind)] * 2
    finally:
        pool.close()
