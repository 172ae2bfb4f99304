"""Whether the servers of a job can sleep while its trainer works: they must share CUDA devices with it."""

from __future__ import annotations

from nightshift.config.job import JobSpec
from nightshift.gpu import Device, Placement
from nightshift.wire.errors import BadInputError


def check_sleep(spec: JobSpec, device: Device, placement: Placement | None) -> None:
    """Checks ``rollout.sleep_mode`` against what there is.

    Args:
        device: of servers and trainer.
        placement: which CUDA device each role has; None on a CPU.

    Raises:
        BadInputError: vLLM cannot sleep there, or nobody would gain by it.
    """
    if not spec.rollout.sleep_mode:
        return
    if device == "cpu":
        raise BadInputError(
            "rollout.sleep_mode needs CUDA: vLLM cannot give memory back on a CPU",
            role="rollout",
            fix="Leave it out",
        )
    if placement is not None and not set(placement.servers(spec.rollout.servers)) & set(placement.trainer):
        raise BadInputError(
            "rollout.sleep_mode is on, but no server shares a CUDA device with the trainer, so that nobody would use "
            "the memory of a server that sleeps",
            role="rollout",
            fix="Leave it out, or set resources.rollout_gpu to a device of the trainer's",
        )
