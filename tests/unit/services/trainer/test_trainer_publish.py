"""How much of the weights changed since the publication before."""

import pytest
import torch

from services.trainer.publish import publish


def weights():
    torch.manual_seed(0)
    return {"embedding": torch.randn(4096, 64), "norm": torch.randn(10, 7), "empty": torch.zeros(0)}


def test_equal_weights_have_not_changed_and_other_ones_have_by_their_share(tmp_path):
    first, same = publish(weights(), tmp_path), publish(weights(), tmp_path)
    assert (first.changed_fraction, same.changed_fraction) == (1.0, 0.0)
    changed = weights()
    changed["embedding"][torch.rand(4096) < 0.3] += 1.0  # rows, as of the tokens that a batch holds
    assert publish(changed, tmp_path).changed_fraction == pytest.approx(0.3, abs=0.05)


def test_every_element_of_a_small_tensor_counts(tmp_path):
    publish({"norm": torch.zeros(10, 7)}, tmp_path)
    changed = torch.zeros(10, 7)
    changed[9, 6] = 1.0
    assert publish({"norm": changed}, tmp_path).changed_fraction == pytest.approx(1 / 70)


def test_tensor_of_another_shape_has_changed_as_a_whole(tmp_path):
    publish({"a": torch.zeros(8), "b": torch.zeros(8)}, tmp_path)
    assert publish({"a": torch.zeros(8), "b": torch.zeros(4, 2)}, tmp_path).changed_fraction == 0.5
