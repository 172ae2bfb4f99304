"""Options of a loss that another loss is chosen for: refused with the job file, not at the first update."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from nightshift.config.algorithm import AlgorithmConfig


@pytest.mark.parametrize("loss", ["ppo_clip", "decoupled_ppo", "gspo", "cispo", "dpo"])
@pytest.mark.parametrize("option", ["importance_cap", "importance_floor", "sequence_importance_cap"])
def test_o16_weights_are_refused_where_the_loss_corrects_already(loss: str, option: str) -> None:
    with pytest.raises(ValidationError, match=f"algorithm.{option} .*{loss!r}.*ppo_clip_proximal"):
        AlgorithmConfig.model_validate({"policy_loss": loss, option: 2.0})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"policy_loss": "ppo_clip", "behaviour_cap": 2.0}, "behaviour_cap"),
        ({"policy_loss": "dpo", "dual_clip": 3.0}, "dual_clip"),
        ({"policy_loss": "ipo", "label_smoothing": 0.1}, "label_smoothing"),
        ({"policy_loss": "ppo_clip", "label_smoothing": 0.1}, "label_smoothing"),
    ],
)
def test_an_option_that_the_loss_would_pass_over_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=f"algorithm.{named} "):
        AlgorithmConfig.model_validate(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy_loss": "ppo_clip_proximal", "importance_cap": 2.0, "sequence_importance_cap": 4.0, "dual_clip": 3.0},
        {"policy_loss": "own.py:loss", "importance_cap": 2.0, "dual_clip": 3.0},
        {"policy_loss": "decoupled_ppo", "behaviour_cap": 2.0, "dual_clip": 3.0},
        {"policy_loss": "dpo", "label_smoothing": 0.1},
    ],
)
def test_options_of_the_chosen_loss_are_taken(settings: dict[str, Any]) -> None:
    config = AlgorithmConfig.model_validate(settings)
    assert all(getattr(config, name) == value for name, value in settings.items())
