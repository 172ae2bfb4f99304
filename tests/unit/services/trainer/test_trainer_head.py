"""Log-probs in chunks equal those of the whole logits, and so do their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.trainer.head import head_log_probs


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """The same by autograd."""
    log_p = torch.log_softmax((hidden @ weight.t()).float() / temperature[:, None], -1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_values_and_gradients_do_not_depend_on_the_chunk(chunk: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets, temperature = torch.randint(0, 11, (7,)), torch.rand(7) + 0.5
    got = head_log_probs(hidden, weight, targets, temperature, chunk=chunk)
    want = whole(hidden, weight, targets, temperature)
    scale = torch.randn(2, 7)
    gradients = [torch.autograd.grad((torch.stack(values) * scale).sum(), (hidden, weight)) for values in (got, want)]
    for one, other in (*zip(got, want, strict=True), *zip(*gradients, strict=True)):
        assert torch.allclose(one.double(), other.double(), atol=1e-5)


def test_bfloat16_states_stay_near_float32() -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(6, 32), torch.randn(50, 32) * 0.3
    targets, temperature = torch.randint(0, 50, (6,)), torch.ones(6)
    exact = whole(hidden, weight, targets, temperature)
    rounded = head_log_probs(hidden.bfloat16(), weight.bfloat16(), targets, temperature, chunk=4)
    for one, other in zip(rounded, exact, strict=True):
        assert one.dtype == torch.float32
        assert torch.allclose(one, other, atol=0.1)
