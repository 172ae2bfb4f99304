"""The example's data, reward and job files."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import yaml

from nightshift.config import JobSpec

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FIRST_RUN = EXAMPLES / "first_run"
JOB_FILES = sorted(EXAMPLES.glob("**/*.yaml"))

make_data = SimpleNamespace(**runpy.run_path(str(FIRST_RUN / "make_data.py")))
score = runpy.run_path(str(FIRST_RUN / "reward.py"))["score"]


@pytest.fixture(params=sorted(make_data.TASKS))
def task(request):
    return request.param


def questions(rows):
    return [row["prompt"][-1]["content"] for row in rows]


def test_training_and_held_out_questions_are_disjoint(task):
    train, test = make_data.rows(task)
    assert len(test) == len(set(questions(test))) == 200
    assert len(train) >= 16 * 8, "enough prompts for the demo's steps without a second epoch"
    assert not set(questions(train)) & set(questions(test))


def test_the_shown_example_is_asked_nowhere(task):
    train, test = make_data.rows(task)
    example = train[0]["prompt"][1]["content"]
    assert example not in questions(train) + questions(test)


def test_answers_follow_from_the_questions():
    train, test = make_data.rows("lastword")
    for row in train + test:
        assert row["reward_model"]["ground_truth"] == row["prompt"][-1]["content"].split(", ")[-1]
    train, test = make_data.rows("twice")
    for row in train + test:
        words = row["prompt"][-1]["content"].removeprefix("Twice: ").split(", ")
        assert sorted(map(words.count, words)) == [1, 1, 1, 2, 2]
        assert words.count(row["reward_model"]["ground_truth"]) == 2


def test_no_place_in_the_list_is_the_answer_s_more_often_than_another():
    train, _ = make_data.rows("twice")
    places = [0] * 5
    for row in train:
        words = row["prompt"][-1]["content"].removeprefix("Twice: ").split(", ")
        for at, word in enumerate(words):
            places[at] += word == row["reward_model"]["ground_truth"]
    assert all(0.35 < count / len(train) < 0.45 for count in places), "2 of 5"


def test_one_seed_gives_one_set_of_files(tmp_path):
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    for folder, seed in ((first, 3), (second, 3), (other, 4)):
        make_data.write(folder, seed)
    names = sorted(path.relative_to(first) for path in first.rglob("*.parquet"))
    assert len(names) == 2 * len(make_data.TASKS)
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes()
        assert (first / name).read_bytes() != (other / name).read_bytes()


def test_files_have_the_columns_that_the_reward_and_the_loader_read(tmp_path):
    for path in make_data.write(tmp_path):
        table = pq.read_table(path)
        assert table.column_names == ["prompt", "data_source", "reward_model", "extra_info"]
        assert not any(column.null_count for column in table.columns)
        assert [message["role"] for message in table["prompt"][0].as_py()] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("tiger", "tiger", 1.0),
        (" tiger\n", "tiger", 1.0),
        ("Tiger", "tiger", 0.0),
        ("tiger.", "tiger", 0.0),
        ("the tiger", "tiger", 0.0),
        ("", "tiger", 0.0),
        ("58", "58", 1.0),
        ("058", "58", 0.0),
    ],
)
def test_reward(response, truth, expected):
    result = score(response=response, ground_truth=truth)
    assert result == expected
    assert type(result) is float


@pytest.mark.parametrize("path", JOB_FILES, ids=[str(path.relative_to(EXAMPLES)) for path in JOB_FILES])
def test_job_files_are_valid_and_name_files_that_exist_or_are_made(path, tmp_path):
    spec = JobSpec.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    data = EXAMPLES / "first_run" / "data"
    made = {data / made.relative_to(tmp_path) for made in make_data.write(tmp_path)}
    for name in spec.data.train_files + spec.data.test_files:
        assert (path.parent / name).resolve() in made or (path.parent / name).exists()
    for reward in spec.rewards:
        if reward.type == "python":
            file, function = reward.function.rsplit(":", 1)
            assert function in runpy.run_path(str(path.parent / file))


def test_the_first_job_learns_with_the_real_parts():
    """The demo keeps the whole pipeline busy: a reference, overlap, a held-out set and a float32 sampler."""
    spec = JobSpec.model_validate(yaml.safe_load((FIRST_RUN / "job.yaml").read_text(encoding="utf-8")))
    assert spec.needs_reference
    assert spec.pipeline.max_staleness == 1
    assert spec.data.test_files
    assert spec.rollout.dtype == spec.trainer.dtype == "float32"
