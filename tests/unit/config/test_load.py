"""Job files: what is accepted, and what a user reads when it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nightshift.config import JobSpec
from nightshift.config.load import load_job, parse_job, read_resolved, write_resolved
from nightshift.wire.errors import BadInputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.parquet").write_bytes(b"")
    (tmp_path / "test.parquet").write_bytes(b"")
    (tmp_path / "model").mkdir()
    (tmp_path / "reward.py").write_text("def score(response, ground_truth):\n    return response == ground_truth\n")
    return tmp_path


def job(folder: Path, **sections: Any) -> Path:
    values: dict[str, Any] = {
        "name": "first",
        "model": {"path": "./model"},
        "data": {"train_files": ["train.parquet"], "test_files": ["test.parquet"]},
        "rewards": [{"function": "reward.py:score"}],
        **sections,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(BadInputError) as caught:
        load_job(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_paths_become_absolute_against_the_job_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = job(folder)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    spec = load_job("../job.yaml")
    assert spec.model.path == str(folder / "model")
    assert spec.data.train_files == [str(folder / "train.parquet")]
    assert spec.rewards[0].function == f"{folder / 'reward.py'}:score"  # type: ignore[union-attr]
    assert spec.resources.runs_dir == str(elsewhere / "runs")
    assert load_job(path) == spec


@pytest.mark.parametrize("name", ["builtin:smollm2-135m-instruct", "organisation/name", "gpt2"])
def test_hf_ids_and_builtin_names_stay_as_they_are(folder: Path, name: str) -> None:
    assert load_job(job(folder, model={"path": name})).model.path == name


def test_interpolation_and_overrides(folder: Path) -> None:
    path = job(folder, rollout={"max_response_length": 32, "max_model_len": "${data.max_prompt_length}"})
    spec = load_job(
        path, ["data.max_prompt_length=128", "rewards[0].weight=2", "rewards.0.name=r", "algorithm.kl_coef=1e-3"]
    )
    assert spec.rollout.max_model_len == 128
    assert (spec.rewards[0].weight, spec.rewards[0].name) == (2.0, "r")
    assert spec.algorithm.kl_coef == 1e-3


def test_override_reaches_a_section_that_the_file_leaves_out(folder: Path) -> None:
    spec = load_job(job(folder), ["resources.ports.trainer=7001", "pipeline.max_staleness=null", "data.test_files=[]"])
    assert (spec.resources.ports.trainer, spec.pipeline.max_staleness, spec.data.test_files) == (7001, None, [])


def test_o44_misspelt_key_gets_the_nearest_one(folder: Path) -> None:
    text = refusal(job(folder, trainer={"learning_rat": 1e-6}))
    assert "'trainer.learning_rat'" in text
    assert "did you mean 'trainer.learning_rate'?" in text


def test_o44_key_in_the_wrong_section_is_sent_to_the_right_one(folder: Path) -> None:
    text = refusal(job(folder, rollout={"learning_rate": 1e-6}))
    assert "unknown key 'rollout.learning_rate'" in text
    assert "'trainer.learning_rate'" in text


def test_o44_scientific_notation_is_a_float(folder: Path) -> None:
    path = job(folder)
    path.write_text(path.read_text() + "trainer:\n  learning_rate: 1e-6\n")
    assert load_job(path).trainer.learning_rate == 1e-06


@pytest.mark.parametrize("value", ["8", 8.0, 8])
def test_o44_numbers_may_be_written_as_text(folder: Path, value: object) -> None:
    size = load_job(job(folder, rollout={"batch_size": value})).rollout.batch_size
    assert size == 8
    assert type(size) is int


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("rollout", "batch_size", True),
        ("rollout", "batch_size", 8.5),
        ("rollout", "batch_size", "eight"),
        ("rollout", "temperature", -1),
        ("rollout", "temperature", True),
        ("rollout", "max_model_len", True),
        ("rollout", "stop_token_ids", [1, True]),
        ("algorithm", "clip_low", None),
        ("algorithm", "kl_estimator", "k4"),
        ("trainer", "zero_stage", True),
        ("trainer", "zero_stage", 4),
        ("trainer", "learning_rate", ".nan"),
        ("data", "train_files", "train.parquet"),
        ("data", "shuffle", "perhaps"),
    ],
)
def test_o44_wrong_value_is_refused_by_name_with_the_value_given(
    folder: Path, section: str, key: str, value: object
) -> None:
    sections = {"data": {"train_files": ["train.parquet"]}} if section == "data" else {}
    sections[section] = {**sections.get(section, {}), key: value}  # type: ignore[dict-item]
    text = refusal(job(folder, **sections))
    assert f"'{section}.{key}' is " in text
    assert "must" in text


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("a.b=1", ["'a.b=1'", "unknown key 'a'"]),
        ("trainer.learning_rat=1", ["unknown key 'trainer.learning_rat'", "'trainer.learning_rate'"]),
        ("learning_rate=1", ["unknown key 'learning_rate'", "'trainer.learning_rate'"]),
        ("trainer.learning_rate.x=1", ["'trainer.learning_rate' has no keys below it"]),
        ("+trainer.seed=1", ["unknown key '+trainer'"]),
        ("trainer.seed", ["write key=value"]),
        ("rewards[7].weight=1", ["rewards[7].weight=1"]),
        ("trainer.seed=[1", ["trainer.seed=[1"]),
        ("lr=3", ["'trainer.learning_rate'"]),
    ],
)
def test_o44_override_with_unknown_path_is_refused(folder: Path, override: str, parts: list[str]) -> None:
    text = refusal(job(folder), override)
    assert all(part in text for part in parts), text


def test_all_errors_are_listed_one_a_line_with_their_line(folder: Path) -> None:
    path = folder / "job.yaml"
    path.write_text(
        "name: a b\nmodel:\n  path: ./model\ndata:\n  train_files: []\nrewards:\n- function: reward.py:score\n"
        "trainer:\n  learning_rat: 1\n  ranks: 0\n"
    )
    lines = refusal(path, "trainer.ranks=-1").splitlines()
    assert lines[0].endswith("has 4 errors:")
    assert [line.split(":")[0].strip() for line in lines[1:4]] == [
        "line 1",
        "line 5",
        "'trainer.ranks' is -1, but must be greater than or equal to 1",
    ]
    assert lines[4].strip().startswith("line 9: unknown key 'trainer.learning_rat'")


def test_missing_section_is_named_with_its_meaning(folder: Path) -> None:
    path = folder / "job.yaml"
    path.write_text("name: a\n")
    text = refusal(path)
    assert all(f"'{key}' is missing" in text for key in ("model", "data", "rewards"))


def test_o44_packed_rows_need_the_attention_that_they_replace(folder: Path) -> None:
    text = refusal(job(folder, trainer={"padding_free": True}), "model.attn_implementation=eager")
    assert "trainer.padding_free" in text
    assert "model.attn_implementation" in text
    assert load_job(job(folder, trainer={"padding_free": True})).trainer.padding_free


def test_empty_section_is_refused_by_name(folder: Path) -> None:
    text = refusal(job(folder, trainer=None))
    assert "'trainer' is null" in text
    assert "learning_rate" in text


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "is empty"),
        (b"- a\n- b\n", "is a list"),
        (b"just words", "is plain text"),
        (b"name: caf\xe9\n", "not UTF-8 text: line 1"),
        (b"name: a\nname: b\n", "line 2 is not valid YAML: found duplicate key"),
        (b"name: [a\n", "not valid YAML"),
        (b"name: !!python/object/apply:os.system [exit]\n", "not valid YAML"),
        (b"name: ${nothing.there}\n", "nothing.there"),
        (b"name: ???\n", "name"),
        (b"name: a\n---\nname: b\n", "not valid YAML"),
        (
            b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
            b"d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d,*d,*d,*d]\n",
            "alias",
        ),
    ],
)
def test_file_that_is_no_job_is_refused_in_one_sentence(tmp_path: Path, data: bytes, part: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(data)
    text = refusal(path)
    assert str(path) in text
    assert part in text


def test_absent_file_is_named(tmp_path: Path) -> None:
    assert f"'{tmp_path / 'none.yaml'}': No such file" in refusal(tmp_path / "none.yaml")


def test_missing_data_and_reward_files_are_all_named(folder: Path) -> None:
    data = {"train_files": ["train.parquet", "gone.parquet"], "test_files": ["lost.jsonl"]}
    text = refusal(job(folder, data=data, rewards=[{"function": "nowhere.py:score"}], model={"path": "./absent"}))
    assert "has 4 errors" in text
    for name in ("gone.parquet", "lost.jsonl", "nowhere.py", "absent"):
        assert str(folder / name) in text


@pytest.mark.parametrize(
    ("source", "reference", "part"),
    [
        ("def score(response): ...", "reward.py:scor", "did you mean 'score'?"),
        ("x = 1", "reward.py:score", "has no function 'score'"),
        ("def score(response:", "reward.py:score", "is not valid Python: line 1"),
        ("def score(solution_str, ground_truth): ...", "reward.py:score", "did you mean 'response'?"),
        ("def score(response, ground_thruth=None): ...", "reward.py:score", "did you mean 'ground_truth'?"),
        ("def score(response, tokenizer, **kwargs): ...", "reward.py:score", "'tokenizer'"),
        ("def score(response, /): ...", "reward.py:score", "positional-only"),
        ("def score(response): ...", "reward.py", "must be path.py:function"),
    ],
)
def test_reward_function_is_checked_without_running_it(folder: Path, source: str, reference: str, part: str) -> None:
    (folder / "reward.py").write_text(
        f"{source}\nraise SystemExit('this file was imported')\n" if "):" in source else source
    )
    text = refusal(job(folder, rewards=[{"function": reference}]))
    assert "rewards[0].function" in text
    assert part in text


@pytest.mark.parametrize(
    "source",
    [
        "def score(**kwargs): ...",
        "def score(response, strict=True, **kwargs): ...",
        "def score(*, prompt, response, response_ids, ground_truth, data_source, extra_info, finish_reason): ...",
        "from elsewhere import score",
        "if True:\n    def score(response): ...",
        "score = make('score')",
        "async def score(response): ...",
    ],
)
def test_reward_functions_that_can_be_called_are_accepted(folder: Path, source: str) -> None:
    (folder / "reward.py").write_text(source)
    load_job(job(folder))


def test_estimator_from_a_file_is_checked_too(folder: Path) -> None:
    (folder / "mine.py").write_text("def advantages(samples, config): ...")
    spec = load_job(job(folder, algorithm={"estimator": "mine.py:advantages"}))
    assert spec.algorithm.estimator == f"{folder / 'mine.py'}:advantages"
    assert "no function 'other'" in refusal(job(folder, algorithm={"estimator": "mine.py:other"}))


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        ("algorithm.estimator", "(batch, config)"),
        ("algorithm.policy_loss", "(inputs, spec)"),
        ("data.curriculum", "(prompts, epoch)"),
    ],
)
def test_functions_of_a_package_are_checked_and_not_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str, arguments: str
) -> None:
    package = folder / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be run by a check')")
    (package / "deep.py").write_text("def right(one, two): ...\ndef wrong(one): ...\ndef keyed(a, b, *, c): ...\n")
    monkeypatch.syspath_prepend(str(folder))
    section, _, name = key.partition(".")
    spec = load_job(job(folder), [f"{key}=package_of_mine.deep.right"])
    assert getattr(getattr(spec, section), name) == "package_of_mine.deep.right"
    for text, says in (
        ("package_of_mine.deep.wrong", f"'wrong' takes (one), expected {arguments}"),
        ("package_of_mine.deep.keyed", f"keyword 'c', expected {arguments}"),
        ("package_of_mine.deep.rihgt", "no function 'rihgt'; did you mean 'right'?"),
        ("package_of_mine.absent.right", "no module 'package_of_mine.absent'"),
        ("no_such_package_at_all.right", "no module 'no_such_package_at_all'"),
        ("math.sqrt", "no module 'math' with a source in Python"),
        ("not a name.at all", "neither path.py:function nor package.module.function"),
    ):
        with pytest.raises(BadInputError) as caught:
            load_job(job(folder), [f"{key}={text}"])
        assert key in str(caught.value)
        assert says in str(caught.value)


def test_resolved_job_is_read_back_as_it_was(folder: Path) -> None:
    spec = load_job(job(folder), ["trainer.learning_rate=3e-7", "name=${oc.decode:a1}"])
    write_resolved(spec, folder / "resolved.yaml")
    assert read_resolved(folder / "resolved.yaml") == spec
    assert [path.name for path in folder.glob(".resolved*")] == []


@given(text=st.text(min_size=1, max_size=30))
def test_resolved_job_keeps_any_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Text that looks like an interpolation or a number stays what it is."""
    values = {
        "name": "a",
        "model": {"path": text},
        "data": {"train_files": ["x"], "prompt_key": "${name}"},
        "rewards": [{"function": "a.py:f"}],
    }
    spec = JobSpec.model_validate(values)
    path = tmp_path_factory.mktemp("resolved") / "job.yaml"
    write_resolved(spec, path)
    assert read_resolved(path) == spec


@pytest.mark.parametrize("text", ["name: [", "name: a\nextra: 1\n"])
def test_spoilt_resolved_job_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(BadInputError, match=r"job\.yaml"):
        read_resolved(path)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_either_a_job_or_refused(data: bytes) -> None:
    with pytest.raises(BadInputError):
        parse_job(data, Path("/"), source="job.yaml")


def test_settings_that_contradict_each_other_are_refused(folder: Path) -> None:
    assert "rollout.n is 1" in refusal(job(folder), "rollout.n=1")
    assert "max_staleness 0" in refusal(job(folder), "pipeline.deterministic=true")
    assert "top_p" in refusal(job(folder), "rollout.top_p=0.9")


def test_a_buffer_that_no_batch_fits_into_is_refused_with_the_reason(folder: Path) -> None:
    sizes = {"batch_size": 8, "n": 4, "max_response_length": 20_000}
    text = refusal(job(folder, rollout=sizes, pipeline={"buffer_mib": 4}))
    assert "pipeline.buffer_mib 4 holds 3 prompt groups" in text
    assert "only a whole batch of 8 empties it again" in text
    assert "Set pipeline.buffer_mib to 9 or more" in text
    assert load_job(job(folder, rollout=sizes, pipeline={"buffer_mib": 9})).pipeline.buffer_mib == 9


def test_a_cap_below_the_batch_is_refused_where_a_batch_starts_at_once(folder: Path) -> None:
    settings = {"max_groups_in_flight": 3, "max_staleness": 0}
    assert load_job(job(folder, rollout={"batch_size": 4}, pipeline=settings)).pipeline.max_groups_in_flight == 3
    text = refusal(job(folder, rollout={"batch_size": 4}, pipeline={**settings, "deterministic": True}))
    assert "starts the 4 prompt groups of a batch at once" in text
    assert "set it to 4 or more, or to null" in text
