"""verl's configurations as job files: each row of the small form, the full form, overrides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from nightshift.cli.main import main
from nightshift.compat.loading import load_any
from nightshift.compat.verl import import_verl, is_verl
from nightshift.compat.verl_keys import FULL, SMALL
from nightshift.compat.verl_reward import score
from nightshift.config import JobSpec
from nightshift.config.load import parse_job
from nightshift.config.suggest import is_known
from nightshift.wire.errors import BadInputError
from tests.fixtures.rows import ROWS_D, write_parquet

MINIMAL = Path(__file__).resolve().parents[2] / "fixtures" / "verl_minimal.yaml"


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    """The small form with its data; the model stays a name."""
    shutil.copy(MINIMAL, tmp_path / "config.yaml")
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "rlhf_examples.parquet", ROWS_D)
    return tmp_path / "config.yaml"


def value_at(spec: JobSpec, target: str) -> Any:
    value: Any = spec
    for part in target.split("."):
        value = getattr(value, part)
    return value


#: What the small form says -> what runs, as in docs/from-verl.md; None: said not to be supported.
TABLE: list[tuple[str, str | None, Any]] = [
    ("trainer.project_name", "name", "qwen2-rlhf-demo-ppo-v1"),
    ("trainer.experiment_name", "name", "qwen2-rlhf-demo-ppo-v1"),
    ("trainer.n_gpus_per_node", "trainer.ranks", 2),
    ("trainer.nnodes", "trainer.ranks", 2),
    ("trainer.total_epochs", "trainer.total_epochs", 1),
    ("trainer.save_freq", "trainer.save_freq", 100),
    ("trainer.test_freq", "trainer.test_freq", 50),
    ("trainer.default_local_dir", "resources.runs_dir", "checkpoints"),
    ("trainer.default_hdfs_dir", None, None),
    ("data.train_files", "data.train_files", ["data/rlhf_examples.parquet"]),
    ("data.max_prompt_length", "data.max_prompt_length", 512),
    ("data.max_response_length", "rollout.max_response_length", 512),
    ("data.chat_template", "data.chat_template", "qwen"),
    ("actor_rollout.model_name_or_path", "model.path", "Qwen/Qwen2-7B-Instruct"),
    ("actor_rollout.backend", "rollout.url", None),
    ("actor_rollout.vllm_config.tensor_parallel_size", None, None),
    ("actor_rollout.vllm_config.dtype", "rollout.dtype", "bfloat16"),
    ("critic.model_name_or_path", "scorers.critic.model", "Qwen/Qwen2-7B-Instruct"),
    ("critic.backend", "scorers.critic.zero_stage", 3),
    ("critic.fsdp_config.sharding_strategy", "scorers.critic.zero_stage", 3),
    ("critic.fsdp_config.mixed_precision", None, None),
    ("algorithm.gamma", "algorithm.gamma", 0.99),
    ("algorithm.lam", "algorithm.gae_lambda", 0.95),
    ("algorithm.kl_penalty", "algorithm.kl_coef", 0.01),
    ("algorithm.adv_estimator", "algorithm.estimator", "gae"),
]


@pytest.mark.parametrize(("key", "target", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_each_row_of_the_small_form(
    minimal: Path, monkeypatch: pytest.MonkeyPatch, key: str, target: str | None, expected: Any
) -> None:
    monkeypatch.chdir(minimal.parent)
    (line,) = [line for line in import_verl(minimal).lines if line.key == key]
    if target is None:
        assert line.verdict == "not supported"
        assert line.note
        return
    assert line.verdict == "mapped"
    found = value_at(load_any(minimal), target)
    if target in ("resources.runs_dir", "data.train_files"):
        base = minimal.parent
        expected = [str(base / item) for item in expected] if isinstance(expected, list) else str(base / expected)
    assert found == expected


def test_the_table_has_every_row_and_no_key_goes_without_a_line(minimal: Path) -> None:
    lines = import_verl(minimal).lines
    assert [row[0] for row in TABLE] == [line.key for line in lines if line.key]
    filled = {line.target for line in lines if line.verdict == "defaulted"}
    assert filled == {"rollout.n", "rollout.batch_size", "rewards"}


def test_every_rule_leads_to_a_key_that_a_job_has() -> None:
    samples = [True, False, 1, 0.5, -1, "bfloat16", "vllm", "gae", "token-mean", "vanilla", "constant", "kl",
               "FULL_SHARD", ["console"], [0.9, 0.95], "error", "cpu"]  # fmt: skip
    flat = {f"{section}": True for section in ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")}
    for rules in (SMALL, FULL):
        for key, rule in rules.items():
            for sample in samples:
                try:
                    outcome = rule(sample, flat)
                except (TypeError, ValueError, IndexError):
                    continue
                for target in outcome.values:
                    assert is_known(tuple(target.split("."))), (key, target)


FULL_FORM: dict[str, Any] = {
    "data": {
        "train_files": "train.parquet",
        "val_files": ["test.parquet"],
        "train_batch_size": 16,
        "max_prompt_length": 256,
        "max_response_length": 128,
        "filter_overlong_prompts": True,
        "truncation": "error",
    },
    "actor_rollout_ref": {
        "model": {"path": "Qwen/Qwen2.5-0.5B", "enable_gradient_checkpointing": True, "use_remove_padding": True},
        "actor": {
            "optim": {"lr": 1e-6, "lr_warmup_steps_ratio": 0.1},
            "ppo_mini_batch_size": 8,
            "ppo_micro_batch_size_per_gpu": 2,
            "use_kl_loss": True,
            "kl_loss_coef": 0.001,
            "kl_loss_type": "low_var_kl",
            "entropy_coeff": 0,
            "clip_ratio": 0.2,
            "clip_ratio_high": 0.28,
            "loss_agg_mode": "seq-mean-token-sum-norm",
            "fsdp_config": {"param_offload": True, "fsdp_size": -1},
        },
        "rollout": {
            "name": "vllm",
            "n": 5,
            "tensor_model_parallel_size": 2,
            "gpu_memory_utilization": 0.6,
            "response_length": "${data.max_response_length}",
            "prompt_length": "${nosuch.key}",
        },
        "ref": {"log_prob_micro_batch_size_per_gpu": 4, "fsdp_config": {"param_offload": True}},
    },
    "critic": {"model": {"path": "Qwen/Qwen2.5-0.5B"}},
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"kl_coef": 0.5}},
    "custom_reward_function": {"path": "my_reward.py", "name": "compute_score"},
    "trainer": {
        "logger": ["console", "wandb", "swanlab"],
        "project_name": "grpo demo",
        "experiment_name": "qwen/0.5b",
        "n_gpus_per_node": 8,
        "nnodes": 2,
        "save_freq": -1,
        "test_freq": 5,
        "total_epochs": 15,
        "resume_mode": "auto",
        "unheard_of": 1,
    },
}


@pytest.fixture
def full(tmp_path: Path) -> Path:
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(FULL_FORM))
    (tmp_path / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth)}\n"
    )
    for name in ("train.parquet", "test.parquet"):
        write_parquet(tmp_path / name, ROWS_D)
    return tmp_path / "ppo.yaml"


def test_the_full_form(full: Path) -> None:
    spec = load_any(full)
    assert spec.name == "grpo-demo-qwen-0.5b"
    assert (spec.rollout.batch_size, spec.rollout.n, spec.rollout.max_response_length) == (16, 5, 128)
    assert (spec.algorithm.estimator, spec.algorithm.kl_coef, spec.algorithm.kl_in) == ("grpo", 0.001, "loss")
    assert (spec.algorithm.kl_estimator, spec.algorithm.loss_aggregation) == ("k3", "constant_length")
    assert (spec.algorithm.clip_low, spec.algorithm.clip_high) == (0.2, 0.28)
    assert (spec.trainer.learning_rate, spec.trainer.ranks, spec.trainer.save_freq) == (1e-6, 8, 0)
    assert spec.trainer.gradient_checkpointing
    assert spec.trainer.padding_free
    assert spec.data.overlong_prompts == "drop"
    assert spec.tracking.wandb == "grpo demo"
    assert spec.scorers.critic is None
    verdicts = {line.key: line for line in import_verl(full).lines}
    for key in (
        "trainer.nnodes",
        "trainer.unheard_of",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
        "actor_rollout_ref.actor.fsdp_config.param_offload",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "actor_rollout_ref.rollout.prompt_length",
        "critic.model.path",
    ):
        assert verdicts[key].verdict == "not supported", key
        assert verdicts[key].note, key
    assert "interpolation" in verdicts["actor_rollout_ref.rollout.prompt_length"].note
    assert "swanlab" in verdicts["trainer.logger"].note
    assert "is off" in verdicts["algorithm.kl_ctrl.kl_coef"].note


def test_the_adapter_calls_a_reward_function_of_verl(full: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(import_verl(full).files["verl_reward_adapter.py"], namespace)  # noqa: S102 (what a reward worker does)
    assert namespace["score"](response="4", ground_truth="4") == {"score": 1.0}


def test_hydras_overrides(full: Path) -> None:
    spec = load_any(
        full,
        [
            "algorithm.adv_estimator=gae",
            "actor_rollout_ref.rollout.n=1",
            "+critic.optim.lr=2e-5",
            "~custom_reward_function",
            "++trainer.device=cpu",
        ],
    )
    assert spec.algorithm.estimator == "gae"
    assert spec.scorers.critic is not None
    assert spec.scorers.critic.learning_rate == 2e-5
    assert spec.resources.device == "cpu"
    assert "verl_reward.py" in spec.rewards[0].model_dump()["function"]
    for wrong in ("nonsense", "=1", "~no.such.key"):
        with pytest.raises(BadInputError, match="override"):
            import_verl(full, [wrong])


def test_the_command_writes_a_job_file(minimal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = minimal.with_name("job.yaml")
    assert main(["import-verl", str(minimal), "-o", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "not supported  trainer.default_hdfs_dir" in shown
    assert parse_job(output.read_bytes(), minimal.parent).algorithm.estimator == "gae"
    assert main(["import-verl", str(minimal), "-o", str(output), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["lines"]) == len(TABLE) + 3


def test_what_is_no_verl_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "job.yaml"
    other.write_text("name: x\nmodel: {path: m}\n")
    assert not is_verl(other)
    assert main(["import-verl", str(other)]) == 2
    assert "no verl configuration" in capsys.readouterr().err
    other.write_text("actor_rollout: {}\n")
    with pytest.raises(BadInputError, match="train_files"):
        import_verl(other)
    assert not is_verl(tmp_path / "absent.yaml")
    other.write_text("a: [")
    assert not is_verl(other)


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("so it is #### 1,234", "1234", 1.0),
        ("so it is #### 12", "1234", 0.0),
        (r"hence \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        ("first 3, then 4.", "4", 1.0),
        ("4.0", "4", 1.0),
        ("yes", "yes", 1.0),
        ("no", "yes", 0.0),
        ("", "4", 0.0),
        ("nan", "nan", 0.0),
    ],
)
def test_the_reward_that_stands_in(response: str, truth: str, expected: float) -> None:
    assert score(response, truth) == expected


def test_the_page_has_the_same_table() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "from-verl.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| `")
    ]
    table = {row[0].strip("`"): row[2] for row in rows if row[0].strip("`") in SMALL}
    assert list(table) == [row[0] for row in TABLE]
    for key, target, _ in TABLE:
        assert (target is None) == ("not supported" in table[key]), key
        if target is not None and "`" in table[key]:
            assert f"`{target}`" in table[key], key
