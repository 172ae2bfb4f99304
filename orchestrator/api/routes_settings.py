"""Live settings of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import Body

from nightshift.config import JobSpec
from nightshift.config.live import LIVE, check_changes, put, settings_of
from nightshift.wire.settings_file import ASKED, asked_for, in_force, write_settings
from orchestrator.api.models import Setting, SettingsList
from orchestrator.api.problems import errors
from orchestrator.api.routes_jobs import JobId
from orchestrator.api.service import Reader, ServiceDep, Submitter, visible
from orchestrator.api.strict import strict_router
from orchestrator.jobs.states import ENDED, StateConflictError
from orchestrator.store.jobs import JobRecord

router = strict_router(prefix="/v1", tags=["settings"])


def _present(record: JobRecord, *, asked: bool = False) -> JobSpec:
    """The job with the settings that are in force, or with those that were asked for."""
    spec = JobSpec.model_validate(record.spec)
    changed = in_force(Path(record.run_dir)) | (asked_for(Path(record.run_dir)) if asked else {})
    for key, value in changed.items():
        if key in LIVE:
            put(spec, key, value)
    return spec


def _list(record: JobRecord) -> SettingsList:
    spec = _present(record)
    now = {setting.key: setting.value for setting in settings_of(spec)}
    asked = asked_for(Path(record.run_dir))
    pending = {key: value for key, value in asked.items() if key in now and value != now[key]}
    shown = [Setting(key=item.key, value=item.value, live=item.live, why=item.why) for item in settings_of(spec)]
    return SettingsList(settings=shown, pending=pending)


@router.get("/jobs/{job_id}/settings", response_model=SettingsList, responses=errors(404))
def settings(service: ServiceDep, caller: Reader, job_id: JobId) -> SettingsList:
    """What can change while the job runs, and what cannot and why."""
    return _list(visible(service, caller, job_id))


@router.patch("/jobs/{job_id}/settings", response_model=SettingsList, responses=errors(404, 409))
def change_settings(
    service: ServiceDep,
    caller: Submitter,
    job_id: JobId,
    changes: Annotated[
        dict[str, Any],
        Body(
            min_length=1,
            max_length=100,
            description="Values by key of the job file, or by the Python API's name.",
            examples=[{"trainer.learning_rate": 1e-6, "use_async_rollout": False}],
        ),
    ],
) -> SettingsList:
    """Changes settings of a job: all of them or, where one is refused, none.

    A change takes effect at the next step boundary, which the job tells as an event of kind `setting` with old and new
    value and step; for a job that does not run, when it goes on.
    """
    record = visible(service, caller, job_id)
    if record.state in ENDED:
        raise StateConflictError(f"the job is {record.state}: its settings cannot change any more", record.state)
    with service.settings_lock:
        wanted = check_changes(_present(record, asked=True), changes)
        run_dir = Path(record.run_dir)
        write_settings(run_dir / ASKED, asked_for(run_dir) | wanted)
    service.access.note(caller.name, "job.settings", record.id, record.project, **wanted)
    return _list(record)
