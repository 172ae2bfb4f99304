"""The critic's loss, and the losses on preference pairs, against published numbers and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nightshift.wire.errors import BadInputError
from nightshift.wire.experience import LossSpec
from services.trainer.checks import check_loss_spec, check_samples
from services.trainer.losses import LossInputs, value_loss
from services.trainer.preference import preference_loss, units
from services.trainer.sums import PartSums, to_metrics
from tests.fixtures.samples import make_sample

PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def dpo_spec(loss: str = "dpo", **options: float) -> LossSpec:
    return LossSpec(policy_loss=loss, aggregation="seq_mean_token_sum", options={"beta": 0.1, **options})


def pair(chosen: list[float], rejected: list[float], dtype: torch.dtype = torch.float64) -> tuple[LossInputs, Tensor]:
    """One pair with these token log-probs; the reference has zeros."""
    logprobs = torch.tensor([*chosen, *rejected], dtype=dtype, requires_grad=True)
    sequence = torch.tensor([0] * len(chosen) + [1] * len(rejected))
    on = torch.ones(len(logprobs), dtype=torch.bool)
    return LossInputs(logprobs, logprobs.detach(), torch.zeros_like(on, dtype=dtype), on, None, sequence, 2), logprobs


@PRECISIONS
def test_o20_value_loss(dtype: torch.dtype) -> None:
    values, old, returns = (torch.tensor(v, dtype=dtype) for v in ([1.0, 5, 2], [0.0, 1, 2], [2.0, 10, -50]))
    mask = torch.tensor([True, True, False])
    outputs = value_loss(values, old, returns, 0.2)
    assert float(outputs.losses[mask].mean()) == pytest.approx(20.17, rel=1e-6)
    assert outputs.clipped[mask].tolist() == [True, True]
    assert float(value_loss(values, old, returns, None).losses[mask].mean()) == pytest.approx(6.5, rel=1e-6)


def test_o20_a_clipped_value_has_no_gradient_and_a_free_one_that_of_the_squared_error() -> None:
    values = torch.tensor([1.0, 0.1], dtype=torch.float64, requires_grad=True)
    value_loss(values, torch.zeros(2), torch.tensor([2.0, 2.0]), 0.2).losses.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 0.1 - 2.0])


def test_the_critics_metrics_are_means_over_its_tokens() -> None:
    sums = PartSums(tokens=4.0, sequences=2.0, loss=10.0, policy=10.0, clipped=1.0)
    metrics = to_metrics(sums, LossSpec(policy_loss="value"))
    assert metrics["loss/critic"] == 2.5
    assert metrics["critic/clip_fraction"] == 0.25
    assert "loss/actor" not in metrics


@PRECISIONS
def test_o23_dpo(dtype: torch.dtype) -> None:
    inputs, _ = pair([-4.0, -6.0], [-5.0, -4.0, -3.0], dtype)
    reference = torch.tensor([-5.0, -6.0, -3.5, -4.0, -4.0], dtype=dtype)
    outputs = preference_loss(inputs, reference, dpo_spec())
    assert float(outputs.losses.sum()) / 2 == pytest.approx(0.620957, abs=1e-6)
    assert [float(outputs.sums[name]) for name in ("chosen", "rejected", "preferred")] == pytest.approx(
        [0.1, -0.05, 1.0], abs=1e-6
    )
    smoothed = preference_loss(inputs, reference, dpo_spec(label_smoothing=0.2))
    assert float(smoothed.losses.sum()) / 2 == pytest.approx(0.8 * 0.620957 + 0.2 * 0.770957, abs=1e-6)
    same = preference_loss(inputs, inputs.behaviour, dpo_spec())
    assert float(same.losses.sum()) / 2 == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_o23_gradient_is_the_finite_difference(loss: str, smoothing: float) -> None:
    spec = dpo_spec(loss, label_smoothing=smoothing)
    reference = torch.tensor([-1.0, -2.0, -1.5], dtype=torch.float64)
    values = [-0.5, -1.0, -2.0]

    def total(logprobs: list[float]) -> Tensor:
        inputs, _ = pair(logprobs[:2], logprobs[2:])
        return preference_loss(inputs, reference, spec).losses.sum() / 2

    inputs, logprobs = pair(values[:2], values[2:])
    (preference_loss(inputs, reference, spec).losses.sum() / 2).backward()
    assert logprobs.grad is not None
    for token in range(3):
        above, below = list(values), list(values)
        above[token] += 1e-6
        below[token] -= 1e-6
        slope = float(total(above) - total(below)) / 2e-6
        assert float(logprobs.grad[token]) == pytest.approx(slope, rel=1e-5)


def test_ipo_pulls_the_difference_to_the_half_of_one_over_beta() -> None:
    inputs, _ = pair([-1.0], [-6.0])  # a difference of 5 = 1 / (2 x 0.1)
    outputs = preference_loss(inputs, torch.zeros(2, dtype=torch.float64), dpo_spec("ipo"))
    assert float(outputs.losses.sum()) == pytest.approx(0.0, abs=1e-12)


def test_masked_tokens_have_no_influence_on_a_pair() -> None:
    inputs, _ = pair([-1.0, -2.0], [-3.0, -4.0])
    mask = torch.tensor([True, False, True, True])
    masked = LossInputs(inputs.logprobs, inputs.behaviour, inputs.advantages, mask, None, inputs.sequence, 2)
    short, _ = pair([-1.0], [-3.0, -4.0])
    zeros = torch.zeros(4, dtype=torch.float64)
    got = preference_loss(masked, zeros, dpo_spec()).losses[mask].sum()
    assert float(got) == pytest.approx(float(preference_loss(short, zeros[:3], dpo_spec()).losses.sum()))


def test_pairs_stay_together_and_single_samples_do_not_need_to() -> None:
    samples = [make_sample(f"g{at // 2}.{at % 2}") for at in range(4)]
    assert [[s.sample_id for s in unit] for unit in units(samples, dpo_spec())] == [["g0.0", "g0.1"], ["g1.0", "g1.1"]]
    assert [len(unit) for unit in units(samples, LossSpec())] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (LossSpec(policy_loss="dpo", aggregation="seq_mean_token_sum"), "beta"),
        (LossSpec(policy_loss="ipo", options={"beta": 0.1}), "seq_mean_token_sum"),
    ],
)
def test_a_preference_loss_without_what_it_needs_is_refused(spec: LossSpec, named: str) -> None:
    with pytest.raises(BadInputError, match=named):
        check_loss_spec(spec)


def test_samples_that_are_no_pairs_are_refused_by_name() -> None:
    def checked(*names: str, **fields: object) -> None:
        samples = [make_sample(name, ref_logprobs=[-1.0] * 3, **fields) for name in names]  # type: ignore[arg-type]
        for sample in samples:
            sample.advantages = sample.logprobs * 0
        check_samples(samples, dpo_spec(), 128, 256)

    checked("g0.0", "g0.1")
    with pytest.raises(BadInputError, match="no pairs"):
        checked("g0.0")
    with pytest.raises(BadInputError, match=r"g0\.0 and g1\.1"):
        checked("g0.0", "g1.1")
    with pytest.raises(BadInputError, match=r"g0\.0 of a pair"):
        checked("g0.0", "g0.1", mask=[0, 0, 0])


def test_a_value_update_needs_values_and_returns() -> None:
    sample = make_sample()
    with pytest.raises(BadInputError, match="no values"):
        check_samples([sample], LossSpec(policy_loss="value"), 128, 256)
    sample.values = sample.returns = sample.logprobs
    check_samples([sample], LossSpec(policy_loss="value"), 128, 256)
