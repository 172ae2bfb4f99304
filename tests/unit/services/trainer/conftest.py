"""Settings of torch in these tests."""

from __future__ import annotations

import torch

# Small tensors: a second thread costs more than it brings, above all beside other work.
torch.set_num_threads(1)
