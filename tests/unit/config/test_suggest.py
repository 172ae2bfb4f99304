"""Suggestions for keys that do not exist."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.config.suggest import describe, dotted, is_known, keys_at, suggest


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (("trainer", "learning_rat"), "'trainer.learning_rate'"),
        (("rollout", "learning_rat"), "'trainer.learning_rate'"),
        (("rollout", "kl_coef"), "'algorithm.kl_coef'"),
        (("rollut",), "'rollout'"),
        (("trainer", "path"), "'model.path'"),
        (("rewards", 0, "wieght"), "'rewards[0].weight'"),
        (("trainer", "lr"), "'trainer.learning_rate'"),
        (("trainer", "completely_else"), "section 'trainer' has the keys total_steps"),
        (("zzz",), "a job file has the keys name, model"),
        (("rollout", "ports"), "'resources.ports'"),
        (("model", "lora_rank"), "adapters (LoRA) are not trained here, the whole model is"),
        (("trainer", "use_lora"), "adapters (LoRA) are not trained here"),
        (("trainer", "peft_config"), "adapters (LoRA) are not trained here"),
        (("rollout", "enable-lora"), "adapters (LoRA) are not trained here"),
        (("model", "explorations"), "section 'model' has the keys"),
    ],
)
def test_suggestion_names_the_right_key(path: tuple[str | int, ...], part: str) -> None:
    assert part in suggest(path)


@given(st.text(min_size=1), st.sampled_from(["trainer", "rollout", "resources"]))
def test_every_unknown_key_gets_some_answer(key: str, section: str) -> None:
    assert suggest((section, key))


def test_known_paths() -> None:
    assert is_known(("resources", "ports", "trainer"))
    assert is_known(("rewards", 3, "url"))
    assert not is_known(("resources", "port"))
    assert not is_known(("name", "first"))
    assert not is_known(())


def test_paths_are_shown_as_users_write_them() -> None:
    assert dotted(("rewards", 0, "weight")) == "rewards[0].weight"
    assert "weight" in keys_at(("rewards", 0))
    assert describe(("trainer", "weight_decay")) == "Decoupled weight decay of AdamW"
    assert describe(("trainer", "no_such_key")) == ""
    assert describe(("data", "train_files")).startswith("Parquet or JSONL files")
