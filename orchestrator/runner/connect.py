"""Connects the trainers of a run at the addresses that services.json has."""

from __future__ import annotations

from pathlib import Path

from nightshift.config import JobSpec
from orchestrator.runner.services import TrainerAddress, read_services
from orchestrator.runner.trainer import TrainerClient
from orchestrator.runner.trainer_files import files_of


def connect_trainer(
    address: TrainerAddress, spec: JobSpec, run_dir: Path, job_trace_id: str, *, critic: bool = False
) -> TrainerClient:
    """A client of the policy's trainer, or with ``critic`` of the critic's, which is started and lost with it."""
    return TrainerClient(
        address.critic_url if critic else address.url,
        run_id=run_dir.name,
        job_trace_id=job_trace_id,
        update_timeout_s=spec.trainer.update_timeout_s,
        away_s=min(60.0, spec.pipeline.role_timeout_s),
        replaced=lambda: (current := read_services(run_dir)) is not None and current.trainer != address,
        token=address.token,
        files=files_of(address, run_dir),
    )
