"""Policy losses, KL terms and importance weights, against published numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nightshift.wire.errors import BadInputError, RoleError
from nightshift.wire.experience import LossSpec
from services.trainer.checks import POLICY_LOSS_NAMES
from services.trainer.losses import POLICY_LOSSES, LossInputs, importance_weight, kl_terms, policy_loss

DTYPE = [torch.float64]


@pytest.fixture(autouse=True, params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def precision(request: pytest.FixtureRequest) -> None:
    """Every test below runs in both precisions."""
    DTYPE[0] = request.param


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=DTYPE[0])


def inputs(
    logprobs: Tensor, behaviour: list[float], advantages: list[float], mask: list[int] | None = None, **more: Tensor
) -> LossInputs:
    kept = torch.tensor(mask if mask is not None else [1] * len(behaviour), dtype=torch.bool)
    return LossInputs(logprobs, tensor(behaviour), tensor(advantages), kept, **more)


def close(got: Tensor, want: list[float] | float, tolerance: float = 1e-6) -> None:
    wanted = torch.tensor(want, dtype=torch.float64)
    assert torch.allclose(got.double(), wanted, atol=tolerance, rtol=1e-6 if got.dtype == torch.float32 else 0)


def test_a_loss_beside_the_policy_losses_is_refused() -> None:
    for name in ("value", "dpo"):
        with pytest.raises(BadInputError, match=name):
            policy_loss(inputs(tensor([-1.0]), [-1.0], [1]), LossSpec(policy_loss=name, options={"beta": 0.1}))


def custom(folder: Path, body: str) -> LossSpec:
    (folder / "mine.py").write_text(f"import torch\ndef loss(inputs, spec):\n    {body}\n")
    return LossSpec(policy_loss=f"{folder / 'mine.py'}:loss", options={"anything": 1.0})


def test_a_loss_of_the_users_own_is_called_with_inputs_and_spec(tmp_path: Path) -> None:
    logprobs = tensor([-1.0, -2.0]).requires_grad_()
    spec = custom(tmp_path, "return -inputs.advantages * inputs.logprobs * spec.options['anything']")
    outputs = policy_loss(inputs(logprobs, [-1.0, -2.0], [1, -1]), spec)
    outputs.losses.sum().backward()
    close(logprobs.grad, [-1.0, 1.0])


def test_a_loss_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "losses_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plain.py").write_text("def loss(inputs, spec):\n    return -spec.options['scale'] * inputs.logprobs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "losses_of_mine", raising=False)  # of the other precision
    monkeypatch.delitem(sys.modules, "losses_of_mine.plain", raising=False)
    spec = LossSpec(policy_loss="losses_of_mine.plain.loss", options={"scale": 2.0})
    logprobs = tensor([-1.0, -2.0]).requires_grad_()
    policy_loss(inputs(logprobs, [-1.0, -2.0], [1, -1]), spec).losses.sum().backward()
    close(logprobs.grad, [-2.0, -2.0])
    with pytest.raises(BadInputError, match=r"'losses_of_mine\.gone'"):
        policy_loss(inputs(logprobs, [-1.0, -2.0], [1, -1]), LossSpec(policy_loss="losses_of_mine.gone.loss"))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return inputs.logprobs.sum()", "one loss per token"),
        ("return 1.0", "one loss per token"),
        ("return inputs.logprobs.detach()", "without a gradient"),
        ("raise KeyError('x')", "raised KeyError"),
    ],
)
def test_what_a_loss_of_the_users_own_returns_is_checked(tmp_path: Path, body: str, says: str) -> None:
    spec = custom(tmp_path, body)
    with pytest.raises(RoleError, match=says):
        policy_loss(inputs(tensor([-1.0]).requires_grad_(), [-1.0], [1]), spec)


def test_every_name_that_is_accepted_is_a_loss() -> None:
    assert set(POLICY_LOSSES) == set(POLICY_LOSS_NAMES)


def test_o11_ppo_clip() -> None:
    logprobs = tensor([0.5, 1.1, 1.5, 0.5, 1.5]).log().requires_grad_()
    outputs = policy_loss(inputs(logprobs, [0.0] * 5, [1, 1, 1, -1, -1]), LossSpec())
    close(outputs.losses, [-0.5, -1.1, -1.2, 0.8, 1.5])
    close(outputs.losses.mean(), -0.1)
    outputs.losses.sum().backward()
    close(logprobs.grad, [-0.5, -1.1, 0, 0, 1.5])
    assert outputs.clipped.tolist() == [False, False, True, True, False]


def test_o12_clip_higher() -> None:
    logprobs = tensor([0.5, 1.1, 1.5, 0.5, 1.5]).log()
    outputs = policy_loss(inputs(logprobs, [0.0] * 5, [1, 1, 1, -1, -1]), LossSpec(clip_high=0.28))
    close(outputs.losses, [-0.5, -1.1, -1.28, 0.8, 1.5])


def test_o12_dual_clip() -> None:
    logprobs = tensor([5, 2, 0.1]).log()
    spec = LossSpec(options={"dual_clip": 3.0})
    close(policy_loss(inputs(logprobs, [0.0] * 3, [-1, -1, -1]), spec).losses, [3, 2, 0.8])


def test_o16_truncated_weights_per_token() -> None:
    logprobs = tensor([-1, -0.2, -3]).requires_grad_()
    sample = inputs(logprobs, [-1.5, -0.4, -2], [1, 1, 1])
    weight = importance_weight(sample, LossSpec(options={"importance_cap": 1.5}))
    close(weight, [1.5, 1.221403, 0.367879])
    assert not weight.requires_grad


def test_o16_weight_is_of_the_old_trainer_not_the_current_one() -> None:
    sample = inputs(tensor([-7, -7, -7]), [-1.5, -0.4, -2], [1, 1, 1], proximal=tensor([-1, -0.2, -3]))
    close(importance_weight(sample, LossSpec(options={"importance_cap": 1.5})), [1.5, 1.221403, 0.367879])


def test_o16_one_weight_per_sequence() -> None:
    sample = inputs(tensor([-1, -0.2, -3]), [-1.5, -0.4, -2], [1, 1, 1])
    close(importance_weight(sample, LossSpec(options={"sequence_importance_cap": 2.0})), [0.740818] * 3)
    first_two = inputs(tensor([-1, -0.2, -3]), [-1.5, -0.4, -2], [1, 1, 1], mask=[1, 1, 0])
    options = {"sequence_importance_cap": 2.0, "sequence_importance_mask": 1.0}
    close(importance_weight(first_two, LossSpec(options=options)), [0.0] * 3)


def test_o16_weights_are_refused_where_the_ratio_corrects_already() -> None:
    with pytest.raises(BadInputError, match="ppo_clip_proximal"):
        policy_loss(inputs(tensor([-1.0]), [-1.0], [1]), LossSpec(options={"importance_cap": 2.0}))


def test_o16_masked_and_two_sided_weights_per_token() -> None:
    sample = inputs(tensor([-1, -0.2, -3]), [-1.5, -0.4, -2], [1, 1, 1])
    masked = LossSpec(options={"importance_cap": 1.5, "importance_mask": 1.0})
    close(importance_weight(sample, masked), [0, 1.221403, 0.367879])
    both = LossSpec(options={"importance_cap": 1.5, "importance_mask": 1.0, "importance_floor": 0.5})
    close(importance_weight(sample, both), [0, 1.221403, 0])
    close(importance_weight(sample, LossSpec(options={"importance_floor": 0.5})), [1.648721, 1.221403, 0])


def test_o17_gspo() -> None:
    sample = inputs(tensor([-1, -1, -9]), [-1.2, -1.3, -1], [2, 2, 2], mask=[1, 1, 0])
    outputs = policy_loss(sample, LossSpec(policy_loss="gspo"))
    close(outputs.losses[:2], [-2.4, -2.4])
    wide = policy_loss(sample, LossSpec(policy_loss="gspo", clip_high=9.0))
    close(wide.losses[:2], [-2 * 1.2840254] * 2)


def test_o18_a_clipped_token_still_learns_under_cispo() -> None:
    logprobs = tensor([2, 0.5, 1]).log().requires_grad_()
    sample = inputs(logprobs, [0.0] * 3, [1, -1, 0.5])
    outputs = policy_loss(sample, LossSpec(policy_loss="cispo", clip_low=1.0, clip_high=0.28))
    close(outputs.losses, [-0.887228, -0.346574 + 2 * 0.0, 0.0])
    outputs.losses.sum().backward()
    close(logprobs.grad, [-1.28, 0.5, -0.5])
    logprobs.grad = None
    policy_loss(sample, LossSpec(clip_high=0.28)).losses.sum().backward()
    close(logprobs.grad, [0, 0, -0.5])


def test_o19_three_policies_of_stale_data() -> None:
    sample = inputs(tensor([-1, -0.5]), [-1.6, -0.9], [1, -1], proximal=tensor([-1.1, -1]))
    close(policy_loss(sample, LossSpec(policy_loss="decoupled_ppo")).losses, [-1.822119, 1.491825])
    close(policy_loss(sample, LossSpec(policy_loss="ppo_clip")).losses, [-1.2, 1.491825])
    close(policy_loss(sample, LossSpec(policy_loss="ppo_clip_proximal")).losses, [-1.105171, 1.648721])


def test_o19_a_cap_leaves_tokens_out_whose_sampler_is_too_far_away() -> None:
    sample = inputs(tensor([-1, -0.5]), [-1.6, -0.9], [1, -1], proximal=tensor([-1.1, -1]))
    spec = LossSpec(policy_loss="decoupled_ppo", options={"behaviour_cap": 1.5})
    close(policy_loss(sample, spec).losses, [0, 1.491825])
    with pytest.raises(BadInputError, match="behaviour_cap"):
        policy_loss(sample, LossSpec(options={"behaviour_cap": 1.5}))


@pytest.mark.parametrize(("kind", "terms"), [("k1_st", [0.2, -0.5, 0]), ("k3_st", [0.0187308, 0.1487213, 0])])
def test_o01_straight_through_has_its_own_value_and_the_gradient_of_k2(kind: str, terms: list[float]) -> None:
    logprobs = tensor([-1, -2, -0.5]).requires_grad_()
    got, _ = kl_terms(logprobs, tensor([-1.2, -1.5, -0.5]), kind)
    close(got.detach(), terms)
    got.sum().backward()
    close(logprobs.grad, [0.2, -0.5, 0.0])


@pytest.mark.parametrize(
    ("estimator", "terms"),
    [("k1", [0.2, -0.5, 0]), ("k2", [0.02, 0.125, 0]), ("k3", [0.0187308, 0.1487213, 0])],
)
def test_o01_kl_terms(estimator: str, terms: list[float]) -> None:
    got, clamped = kl_terms(tensor([-1, -2, -0.5]), tensor([-1.2, -1.5, -0.5]), estimator)
    close(got, terms)
    assert not clamped.any()


def test_o01_a_wild_reference_stays_finite_and_is_counted() -> None:
    logprobs = torch.tensor([-101.0], requires_grad=True)
    terms, clamped = kl_terms(logprobs, torch.tensor([-1.0]), "k3")
    terms.sum().backward()
    assert terms.isfinite().all()
    assert logprobs.grad.isfinite().all()
    assert clamped.tolist() == [True]
    assert kl_terms(torch.tensor([-101.0]), torch.tensor([-1.0]), "k1")[0].item() == -100.0


def test_o01_k3_far_above_the_reference_has_its_own_value_and_slope() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    terms, clamped = kl_terms(logprobs, torch.tensor([-101.0]), "k3")
    terms.sum().backward()
    assert terms.item() == pytest.approx(99.0)  # e^-100 - 1 + 100
    assert logprobs.grad.item() == pytest.approx(1.0)  # 1 - e^-100: the token is still pulled back
    assert not clamped.any()


def test_sums_of_a_loss_of_the_users_own_outlive_importance_weights(tmp_path: Path) -> None:
    source = (
        "from services.trainer.losses import LossOutputs\n\n\n"
        "def loss(inputs, spec):\n"
        "    return LossOutputs(-inputs.logprobs, inputs.mask, {'tokens': inputs.mask.sum()})\n"
    )
    (tmp_path / "own.py").write_text(source)
    sample = inputs(tensor([-1, -0.5]).requires_grad_(), [-1.6, -0.9], [1, -1], proximal=tensor([-1.1, -1]))
    spec = LossSpec(policy_loss=f"{tmp_path / 'own.py'}:loss", options={"importance_cap": 1.5})
    outputs = policy_loss(sample, spec)
    assert outputs.sums["tokens"].item() == 2
    close(outputs.losses.detach(), [1.5, 0.5 * 0.904837])


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_float32_leaves_loss_and_gradient_finite(name: str, advantage: float) -> None:
    logprobs = torch.tensor([-0.1, -200.0], requires_grad=True)
    behaviour = torch.tensor([-200.0, -0.1])
    sample = LossInputs(logprobs, behaviour, torch.full((2,), advantage), torch.ones(2, dtype=torch.bool))
    losses = policy_loss(sample, LossSpec(policy_loss=name)).losses
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (LossSpec(policy_loss="ppo_klip"), "ppo_klip"),
        (LossSpec(aggregation="mean"), "mean"),
        (LossSpec(kl_estimator="k4"), "k4"),
        (LossSpec(temperature=0.0), "temperature"),
        (LossSpec(aggregation="constant_length"), "constant_length"),
        (LossSpec(options={"dual_klip": 3.0}), "dual_klip"),
    ],
)
def test_what_a_loss_does_not_know_is_refused_by_name(spec: LossSpec, named: str) -> None:
    with pytest.raises(BadInputError, match=named):
        policy_loss(inputs(tensor([-1.0]), [-1.0], [1]), spec)
