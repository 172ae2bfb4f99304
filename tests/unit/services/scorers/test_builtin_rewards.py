"""The rewards that come with the project: judge, code in a sandbox, classifier and embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from nightshift.config.rewards import CodeReward, JudgeReward
from nightshift.wire.errors import BadInputError
from services.scorers.judge import JudgeScorer, fill, read_grade
from services.scorers.sandbox import CodeScorer, program_of, run_program


def sample(response: str = "4", **fields: Any) -> dict[str, Any]:
    return {"id": "g0.0", "prompt": "2+2?", "response": response, "ground_truth": "4", **fields}


# Judge ---------------------------------------------------------------------------------------------------------------


def judge(answer: Any, **settings: Any) -> tuple[JudgeScorer, list[dict[str, Any]]]:
    """A judge whose URL is answered by ``answer(request number)``: a text, a status code or an exception."""
    asked: list[dict[str, Any]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append({"url": str(request.url), "headers": request.headers, "body": json.loads(request.content)})
        found = answer(len(asked)) if callable(answer) else answer
        if isinstance(found, Exception):
            raise found
        if isinstance(found, int):
            return httpx.Response(found)
        return httpx.Response(200, json={"choices": [{"message": {"content": found}}]})

    config = JudgeReward(url="http://judge/v1", model="m", **settings)
    return JudgeScorer(config.model_dump(mode="json"), httpx.MockTransport(handle)), asked


async def test_a_grade_becomes_a_reward_between_0_and_1() -> None:
    scorer, asked = judge("Grade: 7")
    (result,) = await scorer.score([sample("it is {prompt} 4")])
    assert result["score"] == pytest.approx(0.7)
    assert asked[0]["url"] == "http://judge/v1/chat/completions"
    text = asked[0]["body"]["messages"][0]["content"]
    assert "2+2?" in text
    assert "it is {prompt} 4" in text  # braces of a response are not filled in
    assert asked[0]["body"]["temperature"] == 0.0


@pytest.mark.parametrize(
    ("reply", "grade"),
    [
        ("Grade: 7", 7.0),
        ("7", 7.0),
        ("Of 3 points I see 2. Score: 8.5", 8.5),
        ("first score 2, final score: 9", 9.0),
        ("between 3 and 4", None),
        ("none", None),
        ("Grade: 11", None),
        ("-1", None),
    ],
)
def test_what_counts_as_a_grade(reply: str, grade: float | None) -> None:
    assert read_grade(reply, 0.0, 10.0) == grade


async def test_o36_a_reply_without_a_grade_is_unscored_and_never_a_zero() -> None:
    scorer, _ = judge("I would rather not say")
    (result,) = await scorer.score([sample()])
    assert result["score"] is None
    assert result["error_type"] == "type"
    assert "rather not" in result["error"]


async def test_a_judge_that_is_busy_is_asked_again_and_one_that_stays_away_leaves_samples_unscored() -> None:
    scorer, asked = judge(lambda number: 503 if number == 1 else "Grade: 10")
    assert (await scorer.score([sample()]))[0]["score"] == 1.0
    assert len(asked) == 2
    scorer, asked = judge(400)
    (result,) = await scorer.score([sample()])
    assert (result["score"], result["error_type"], len(asked)) == (None, "raised", 1)
    scorer, _ = judge(httpx.ConnectError("refused"), retries=0)
    assert (await scorer.score([sample()]))[0]["error_type"] == "raised"


async def test_o35_a_judge_that_never_answers_meets_its_limit() -> None:
    import asyncio

    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(3600)
        raise AssertionError

    settings = JudgeReward(url="http://judge/v1", model="m", timeout_s=0.05).model_dump(mode="json")
    scorer = JudgeScorer(settings, httpx.MockTransport(never))
    (result,) = await scorer.score([sample()])
    assert result["error_type"] == "timeout"


async def test_the_key_comes_from_the_environment_and_is_refused_where_it_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    scorer, asked = judge("Grade: 1", api_key_variable="JUDGE_KEY")
    await scorer.score([sample()])
    assert asked[0]["headers"]["authorization"] == "Bearer secret"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(BadInputError, match="JUDGE_KEY"):
        judge("Grade: 1", api_key_variable="JUDGE_KEY")
    with pytest.raises(BadInputError, match="response"):
        judge("Grade: 1", instruction="Grade it")
    with pytest.raises(BadInputError, match="highest"):
        judge("Grade: 1", lowest=3.0, highest=3.0)


def test_a_dialogue_is_filled_in_as_text() -> None:
    asked = fill("{prompt} | {response} | {ground_truth} | {other}", sample(prompt=[{"role": "user", "content": "hi"}]))
    assert asked == "user: hi | 4 | 4 | {other}"


# Code ----------------------------------------------------------------------------------------------------------------


PRINTS_2 = [{"input": "", "output": "2"}]


def coder(**settings: Any) -> CodeScorer:
    return CodeScorer(CodeReward(cpu_s=1, **settings).model_dump(mode="json"))


def score(scorer: CodeScorer, response: str, tests: Any) -> dict[str, Any]:
    return dict(scorer.score([sample(response, ground_truth=tests)])[0])


def test_programs_are_scored_by_assertions_and_by_input_and_output() -> None:
    scorer = coder()
    right, wrong = "```python\ndef f(x):\n    return x + 1\n```", "def f(x):\n    return x"
    assert score(scorer, f"Here it is:\n{right}", "assert f(1) == 2")["score"] == 1.0
    assert score(scorer, wrong, "assert f(1) == 2")["score"] == 0.0
    pairs = [{"input": "3", "output": "4"}, {"input": "9", "output": "10\n"}]
    assert score(scorer, "print(int(input()) + 1)", pairs)["score"] == 1.0
    assert score(scorer, "print(4)", pairs)["score"] == 0.0
    half = score(coder(partial=True), "print(4)", pairs)
    assert half["score"] == 0.5
    assert half["parts"]["tests_passed"] == 0.5


@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "raise SystemExit", "import os; os._exit(0)"])
def test_a_program_that_leaves_before_its_assertions_has_passed_none(leave: str) -> None:
    scorer = coder()
    assert score(scorer, leave, "assert f(1) == 2")["score"] == 0.0
    assert (
        score(scorer, f"print(2, flush=True)\n{leave}", PRINTS_2)["score"] == 1.0
    )  # what it printed is all it was asked


def test_a_row_without_tests_is_unscored() -> None:
    for tests in (None, "", [], [{"input": "1"}]):
        result = score(coder(), "print(1)", tests)
        assert (result["score"], result["error_type"]) == (None, "none")


def test_the_last_block_is_the_program() -> None:
    assert program_of("```python\na\n```\nbetter:\n```\nb\n```") == "b\n"
    assert program_of("print(1)") == "print(1)"


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("x = bytearray(10**9)", "memory"),
        ("import sys; sys.exit(3)", "failed"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "failed"),
        ("open('f', 'wb').write(b'0' * (2 << 20))", "failed"),
    ],
)
def test_o35_a_program_that_misbehaves_ends_within_its_limits(program: str, kind: str) -> None:
    assert run_program(program, "", cpu_s=1, memory_mib=128, wall_s=4).kind == kind


def test_what_a_program_starts_ends_with_it_and_sees_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SCORER", "x")
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(999)\n"
        "print(len(os.listdir('.')), 'SECRET_OF_THE_SCORER' in os.environ)\n"
    )
    outcome = run_program(program, "", cpu_s=1, memory_mib=128, wall_s=10)
    assert outcome.output.split() == ["1", "False"]
    running = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.is_file()]
    assert not any(b"nightshift-code-" in line for line in running)


def test_limits_hold_for_what_a_program_prints() -> None:
    outcome = run_program("print('x' * (4 << 20))", "", cpu_s=2, memory_mib=256, wall_s=10)
    assert len(outcome.output) <= 1 << 20
