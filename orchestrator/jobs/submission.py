"""From a submitted document to a job in its folder: checked, with its files beside it, and free of the server's own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nightshift.cli.runs import JOB, make_run
from nightshift.config import JobSpec
from nightshift.config.files import CHAT_TEMPLATES, is_remote, local_files, resolve_files
from nightshift.config.functions import is_reference
from nightshift.config.load import write_resolved
from nightshift.config.messages import explain_all
from nightshift.config.plain import texts
from nightshift.config.suggest import dotted
from nightshift.wire.errors import BadInputError
from orchestrator.jobs.document import DocumentError
from orchestrator.jobs.uploads import REFERENCE, SCHEME, Uploads

#: Largest source file of a reward function: it is parsed where it is submitted.
_MAX_SOURCE = 1 << 20
#: ``path.py:function``, wherever it stands.
_FUNCTION = re.compile(r"\.py:\w+$")
#: Sections and keys that belong to the service, whatever a submission says.
_OWN = ("resources.runs_dir", "resources.weight_store")


class CodeForbiddenError(BadInputError):
    """The submission brings code, and its token may not."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What submissions may name.

    Attributes:
        allowed: folders of this machine whose files submissions may name.
        weight_store: folder of published weights.
    """

    allowed: Sequence[Path] = ()
    weight_store: str = "/dev/shm"


def validate(document: dict[str, Any]) -> JobSpec:
    """The document as a job.

    Raises:
        DocumentError: with each field that is wrong.
    """
    try:
        return JobSpec.model_validate(document)
    except ValidationError as errors:
        problems = [(dotted(path), text) for path, text in explain_all(errors)]
        raise _wrong(problems) from errors
    except (OverflowError, RecursionError) as error:
        raise DocumentError(f"the job cannot be read: {type(error).__name__}") from error


def code_fields(spec: JobSpec) -> list[str]:
    """The fields by which a job brings something that is executed."""
    found = [field for field, text in texts(spec.model_dump(mode="json")) if _FUNCTION.search(text)]
    modules = {  # of the server's, imported by name
        "algorithm.estimator": spec.algorithm.estimator,
        "algorithm.policy_loss": spec.algorithm.policy_loss,
        "data.curriculum": spec.data.curriculum or "",
    }
    found += [field for field, text in modules.items() if is_reference(text) and field not in found]
    found += [f"rewards[{at}].type" for at, reward in enumerate(spec.rewards) if reward.type == "code"]
    for at, reward in enumerate(spec.rewards):
        if getattr(reward, "api_key_variable", None):  # any variable of the server, sent to any address
            found.append(f"rewards[{at}].api_key_variable")
    if spec.rollout.extra_args:
        found.append("rollout.extra_args")
    return found


def check_code(spec: JobSpec, may_bring_code: bool) -> None:
    """Checks that who submits may bring the code that the job brings.

    Raises:
        CodeForbiddenError: not so.
    """
    fields = code_fields(spec)
    if fields and not may_bring_code:
        raise CodeForbiddenError(
            f"the job brings code ({', '.join(fields)}), and this token has no scope 'code'",
            role="job",
            fix="Ask for a token with the scope 'code', or use a grpc reward that runs elsewhere",
        )


def check_fleet(spec: JobSpec, fleets: Sequence[str]) -> None:
    """Checks that the service has the fleet that a job names.

    Args:
        fleets: names of those that it has.

    Raises:
        DocumentError: it has not.
    """
    if (fleet := spec.rollout.fleet) is not None and fleet.name not in fleets:
        known = f"it must be one of {', '.join(fleets)}" if fleets else "this service has none"
        raise _wrong([("rollout.fleet.name", f"is {fleet.name!r}, and there is no such fleet: {known}")])


def new_job_id(name: str, now: float) -> str:
    """``<name>-<UTC date>-<UTC time>-<8 hex digits>``."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{os.urandom(4).hex()}"


def prepare(
    spec: JobSpec, runs_dir: Path, uploads: Uploads, project: str, policy: Policy, now: float
) -> tuple[str, Path, JobSpec]:
    """Makes the folder of a new job; returns its id, its folder and the job as it will run.

    Raises:
        DocumentError: a file is missing, wrong, or may not be named; nothing is left behind then.
        OSError: the folder cannot be written.
    """
    spec = spec.model_copy(deep=True)
    job_id = new_job_id(spec.name, now)
    run_dir = runs_dir / job_id
    problems = check_paths(spec, policy) + check_hosts(spec)
    if problems:
        raise _wrong(problems)
    try:
        make_run(run_dir)
    except BadInputError as error:
        if isinstance(error.__cause__, OSError):  # the server's trouble, not the submission's
            raise error.__cause__ from error
        raise
    try:
        problems = _place_uploads(spec, uploads, project, run_dir / "inputs")
        if not problems:
            spec.resources.runs_dir = str(runs_dir)
            spec.resources.weight_store = policy.weight_store
            for port in type(spec.resources.ports).model_fields:
                setattr(spec.resources.ports, port, 0)
            problems = [_split(text) for text in _resolve(spec, run_dir)]
        if problems:
            raise _wrong(problems)
        write_resolved(spec, run_dir / JOB)
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise
    return job_id, run_dir, spec


def _resolve(spec: JobSpec, run_dir: Path) -> list[str]:
    try:
        return resolve_files(spec, run_dir)
    except (RecursionError, MemoryError) as error:
        return [f"rewards: a source file cannot be parsed: {type(error).__name__}"]


def check_hosts(spec: JobSpec) -> list[tuple[str, str]]:
    """Fields that name hosts to which the service's own tokens would go, with one sentence each."""
    return [
        (f"resources.agents.{role}", "belongs to the installation (NIGHTSHIFT_TRAINER_AGENT, NIGHTSHIFT_SCORERS_AGENT)")
        for role, url in spec.resources.agents.model_dump().items()
        if url is not None
    ]


def check_paths(spec: JobSpec, policy: Policy) -> list[tuple[str, str]]:
    """Fields that name a file of this machine which a submission may not name, with one sentence each."""
    problems = []
    for field, text in texts(spec.model_dump(mode="json")):
        if field in _OWN or text.startswith(SCHEME) or not _is_local(field, text):
            continue
        path = Path(text.rpartition(":")[0] if _FUNCTION.search(text) else text)
        if not any(_within(path, folder) for folder in policy.allowed):
            allowed = ", ".join(str(folder) for folder in policy.allowed)
            what = f"below {allowed}, or an upload" if allowed else "an upload"
            problems.append(
                (
                    field,
                    f"names {text!r} on the server, which a submission may not: it must be {what} (nightshift submit)",
                )
            )
    return problems


def _place_uploads(spec: JobSpec, uploads: Uploads, project: str, folder: Path) -> list[tuple[str, str]]:
    problems = []
    for field, text, put in list(local_files(spec)):
        if not text.startswith(SCHEME):
            continue
        match = REFERENCE.fullmatch(text)
        found = uploads.find(project, match[1]) if match else None
        if match is None:
            problems.append((field, f"is {text[:120]!r}, but must be upload:<sha256>/<file name>"))
        elif found is None:
            problems.append((field, f"refers to an upload that is not there: PUT /v1/uploads/{match[1]} first"))
        elif match[2].endswith(".py") and found.stat().st_size > _MAX_SOURCE:
            problems.append((field, "is larger than a source file may be (1 MiB)"))
        else:
            target = folder / match[1][:16] / match[2]
            uploads.place(found, target)
            put(str(target))
    return problems


def _is_local(field: str, text: str) -> bool:
    """Whether a text names a file of this machine: by its form, or by where it stands."""
    if field.endswith(".instruction"):
        return False
    if is_remote(text):
        return text.startswith(("file:", "sqlite:"))
    if text.startswith(("/", "~", "./", "../")) or "/../" in text or text in (".", ".."):
        return True
    if field.startswith("data.") and field != "data.curriculum":
        name = field.partition("[")[0]
        return name in ("data.train_files", "data.test_files") or (
            name == "data.chat_template" and text not in CHAT_TEMPLATES
        )
    return _FUNCTION.search(text) is not None


def _within(path: Path, folder: Path) -> bool:
    if not path.is_absolute():
        return False
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):
        return False


def _split(problem: str) -> tuple[str, str]:
    field, _, text = problem.partition(": ")
    return field, text


def _wrong(problems: Iterable[tuple[str, str]]) -> DocumentError:
    found = list(problems)
    first = found[0]
    message = f"{first[0]}: {first[1]}" if first[0] and first[0] not in first[1] else first[1]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return DocumentError(f"{message}{more}", problems=found)


def body_hash(document: dict[str, Any], **settings: Any) -> str:
    """Names a submission: two with the same hash ask for the same."""
    text = json.dumps([document, settings], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
