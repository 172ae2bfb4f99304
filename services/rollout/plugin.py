"""Makes Nightshift's weight transfer known to vLLM; found through the entry point below ``site/``."""

from __future__ import annotations

#: Name in ``--weight-transfer-config``.
BACKEND = "safetensors"


def register() -> None:
    """Registers the engine. vLLM calls this in each of its processes, perhaps more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "services.rollout.engine", "SafetensorsEngine")
    except ValueError:  # what the factory raises when the name is taken: this is not the first call
        return
