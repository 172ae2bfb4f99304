"""Deploys the scorers of a job on Ray Serve, behind one gRPC port."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from ray import serve

from nightshift.config import JobSpec
from nightshift.config.rewards import PythonReward, RemoteReward
from nightshift.config.scorers import REMOTE
from nightshift.wire import listen
from nightshift.wire.errors import BadInputError, NightshiftError, RoleError, RoleTimeoutError
from nightshift.wire.v1 import common_pb2, scorer_pb2, scorer_pb2_grpc
from services.scorers import ingress, reward_pool
from services.scorers.replicas import BuiltinRewardReplica, CriticReplica, ReferenceReplica, RewardReplica
from services.scorers.states import state_of

#: Serve's own bookkeeping; the samples in flight are bounded by the caller.
_OPTIONS: dict[str, Any] = {
    "num_replicas": 1,
    "max_ongoing_requests": 256,
    "max_queued_requests": -1,
    "health_check_period_s": 5,
    "health_check_timeout_s": 60,
    "graceful_shutdown_timeout_s": 5,
    "graceful_shutdown_wait_loop_s": 0.2,
    # The first failure is the user's to read; a second attempt would fail in the same way.
    "max_constructor_retry_count": 1,
}
_CPUS = 0.01  # of Ray's logical ones: the scorers are not what limits the number of actors
_GPUS = 0.1
_POLL_S = 0.2
_ERROR_LINE = re.compile(r"nightshift\.wire\.errors\.\w+: (.*)")
_EXCEPTION_LINE = re.compile(r"^[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*")


@dataclass(frozen=True, slots=True)
class _Application:
    name: str
    role: str
    start_timeout_s: float
    deployment: Any  # a bound ray.serve Application


def deploy(spec: JobSpec, port: int, otlp: str | None, run_id: str) -> dict[str, Any]:
    """Deploys the rewards and the reference of a job, and waits until each answers.

    The process must have called ray.init with ``ingress.RAY_ENVIRONMENT`` set. Scorers that the job names by URL are
    passed on as they are.

    Args:
        spec: the resolved job; model paths are local folders.
        port: port of the gRPC ingress.
        otlp: OTLP/gRPC endpoint for the spans, or None.
        run_id: the run that the scorers belong to.

    Returns:
        The scorers' part of services.json: ``rewards`` (list of name, url, application), ``reference``, ``teacher``
        and ``critic`` (url and application, or None).

    Raises:
        BadInputError: a reward function or the reference model cannot be used.
        RoleTimeoutError: a scorer had not started within ``scorers.start_timeout_s``.
        RoleError: the port is taken, or a scorer failed at its start.
    """
    url = f"grpc://{listen.reached_as()}:{port}"
    applications: list[_Application] = []
    rewards: list[dict[str, Any]] = []
    for reward in spec.rewards:
        if isinstance(reward, PythonReward):
            name = reward.name or reward.function.rpartition(":")[2]
            application = _reward(spec, reward, _application_name(name, applications), otlp, run_id)
            applications.append(application)
            rewards.append({"name": name, "url": url, "application": application.name})
        elif isinstance(reward, RemoteReward):
            entry = {"name": reward.name, "url": reward.url, "application": _application_name(reward.name, [])}
            rewards.append(entry)
        else:
            application = _builtin(spec, reward, _application_name(reward.name, applications), otlp, run_id)
            applications.append(application)
            rewards.append({"name": reward.name, "url": url, "application": application.name})
    reference = _reference_entry(spec, url)
    if reference is not None and reference["url"] == url:
        applications.append(_reference(spec, otlp, run_id))
    teacher = _teacher_entry(spec, url)
    if teacher is not None and teacher["url"] == url:
        applications.append(_teacher(spec, otlp, run_id))
    critic = None
    if spec.scorers.critic is not None:
        critic = {"url": url, "application": "critic"}
        applications.append(_critic(spec, otlp, run_id))
    if applications:
        _start_serve(port)
        try:
            _run(applications, port, spec.scorers.start_timeout_s)
        except BaseException:
            undeploy()
            raise
    return {"rewards": rewards, "reference": reference, "teacher": teacher, "critic": critic}


def undeploy() -> None:
    """Ends the scorers and Serve with them; Ray stays."""
    serve.shutdown()


def _reward(spec: JobSpec, reward: PythonReward, application: str, otlp: str | None, run_id: str) -> _Application:
    timeout_s = spec.scorers.start_timeout_s
    # Said here in one sentence, before Serve starts anything; the replica then loads the same file.
    reward_pool.check(reward.function, timeout_s)
    deployment = _deployment(RewardReplica, "reward").bind(
        reward.function, reward.workers, reward.timeout_s, timeout_s, otlp, run_id, reward.batched
    )
    return _Application(application, "reward", timeout_s, deployment)


def _builtin(spec: JobSpec, reward: Any, application: str, otlp: str | None, run_id: str) -> _Application:
    """A reward that comes with the project."""
    gpu = reward.type in ("classifier", "embedding") and _cuda(spec.resources.device)
    deployment = _deployment(BuiltinRewardReplica, reward.type, gpus=_GPUS if gpu else 0).bind(
        reward.type, reward.model_dump(mode="json"), spec.resources.device, otlp, run_id
    )
    return _Application(application, "reward", spec.scorers.start_timeout_s, deployment)


def _reference_entry(spec: JobSpec, url: str) -> dict[str, Any] | None:
    if not spec.needs_reference:
        return None
    model = spec.scorers.reference.model
    remote = model is not None and model.startswith(REMOTE)
    return {"url": model if remote else url, "application": "reference"}


def _reference(spec: JobSpec, otlp: str | None, run_id: str) -> _Application:
    config = spec.scorers.reference
    path = config.model or spec.model.path
    if not (Path(path) / "config.json").is_file():
        message = f"there is no model in {path}: it has no config.json"
        raise BadInputError(message, role="reference", fix="Correct scorers.reference.model or model.path")
    device = spec.resources.device
    deployment = _deployment(ReferenceReplica, "reference", gpus=_GPUS if _cuda(device) else 0).bind(
        path,
        config.dtype,
        config.micro_batch_size,
        config.threads,
        spec.model.attn_implementation,
        device,
        otlp,
        run_id,
    )
    return _Application("reference", "reference", spec.scorers.start_timeout_s, deployment)


def _teacher_entry(spec: JobSpec, url: str) -> dict[str, Any] | None:
    teacher = spec.scorers.teacher
    if teacher is None or not spec.needs_teacher:
        return None
    return {"url": teacher.model if teacher.model.startswith(REMOTE) else url, "application": "teacher"}


def _teacher(spec: JobSpec, otlp: str | None, run_id: str) -> _Application:
    config = spec.scorers.teacher
    assert config is not None
    if not (Path(config.model) / "config.json").is_file():
        message = f"there is no model in {config.model}: it has no config.json"
        raise BadInputError(message, role="teacher", fix="Correct scorers.teacher.model")
    device = spec.resources.device
    deployment = _deployment(ReferenceReplica, "teacher", gpus=_GPUS if _cuda(device) else 0).bind(
        config.model,
        config.dtype,
        config.micro_batch_size,
        config.threads,
        spec.model.attn_implementation,
        device,
        otlp,
        run_id,
        "teacher",
    )
    return _Application("teacher", "teacher", spec.scorers.start_timeout_s, deployment)


def _critic(spec: JobSpec, otlp: str | None, run_id: str) -> _Application:
    config = spec.scorers.critic
    assert config is not None
    path = config.model or spec.model.path
    if not (Path(path) / "config.json").is_file():
        message = f"there is no model in {path}: it has no config.json"
        raise BadInputError(message, role="critic", fix="Correct scorers.critic.model or model.path")
    device = spec.resources.device
    # Where the trainer of the critic publishes: a folder below the run's weight store.
    store = Path(spec.resources.weight_store) / f"nightshift-{run_id}" / "critic"
    deployment = _deployment(CriticReplica, "critic", gpus=_GPUS if _cuda(device) else 0).bind(
        path,
        str(store),
        config.dtype,
        config.micro_batch_size,
        config.threads,
        spec.model.attn_implementation,
        device,
        otlp,
        run_id,
    )
    return _Application("critic", "critic", spec.scorers.start_timeout_s, deployment)


def _deployment(replica: type, name: str, gpus: float = 0) -> Any:
    actor = {"num_cpus": _CPUS, "num_gpus": gpus}
    return serve.deployment(replica).options(name=name, ray_actor_options=actor, **_OPTIONS)


def _cuda(device: str) -> bool:
    """Whether Ray has a GPU for the reference; without one, "auto" is the CPU."""
    import ray

    return device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0


def _application_name(name: str, taken: list[_Application]) -> str:
    """The name in the call's metadata, which gRPC allows ASCII in only."""
    base = "reward-" + re.sub(r"[^A-Za-z0-9._-]", "_", name)
    names = {application.name for application in taken}
    return next(name for n in range(len(names) + 1) if (name := f"{base}-{n}" if n else base) not in names)


def _start_serve(port: int) -> None:
    if os.environ.get(ingress.CALLBACK_VARIABLE) != ingress.CALLBACK:
        message = f"{ingress.CALLBACK_VARIABLE} is not set, so that Serve would listen on every interface"
        fix = "Set services.scorers.ingress.RAY_ENVIRONMENT before ray is imported"
        raise RoleError(message, role="scorers", fix=fix)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ingress.LOOPBACK, port))
        except OSError as error:
            message = f"port {port} on {ingress.LOOPBACK} cannot be used: {error.strerror}"
            fix = "Set resources.ports.scorers to another port, or to 0"
            raise RoleError(message, role="scorers", fix=fix) from error
    try:
        serve.start(
            proxy_location="HeadOnly",
            # Serve always starts its HTTP server too. The scorers do not answer there, and any free port does.
            http_options={"host": ingress.LOOPBACK, "port": 0},
            grpc_options={
                "port": port,
                "grpc_servicer_functions": [
                    f"{scorer_pb2_grpc.__name__}.{scorer_pb2_grpc.add_ScorerServiceServicer_to_server.__name__}"
                ],
                "enable_reflection": False,
            },
            logging_config={"enable_access_log": False},
        )
    except Exception as error:
        raise RoleError(f"Serve did not start: {_last_line(str(error))}", role="scorers") from error
    if listen.listen_on() == ingress.LOOPBACK and ingress.listens_beyond_loopback(port):
        undeploy()
        message = f"Serve listens on port {port} beyond loopback, where anyone may call the scorers"
        raise RoleError(message, role="scorers", fix="Use the locked release of Ray")


def _run(applications: list[_Application], port: int, timeout_s: float) -> None:
    serve.run_many(
        # Serve's gRPC ingress knows only applications that have an HTTP route as well.
        [serve.RunTarget(target=app.deployment, name=app.name, route_prefix=f"/{app.name}") for app in applications],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    deadline = time.monotonic() + timeout_s
    with grpc.insecure_channel(f"{ingress.LOOPBACK}:{port}") as channel:
        stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        for application in applications:
            while (reason := _running(application) or _answers(stub, application)) is not None:
                if time.monotonic() > deadline:
                    message = f"waited {timeout_s:g} s for {application.name} to start on Serve: {reason}"
                    fix = "Raise scorers.start_timeout_s, or free the machine"
                    raise RoleTimeoutError(message, role=application.role, fix=fix)
                time.sleep(_POLL_S)


def _running(application: _Application) -> str | None:
    """Why the application does not run yet; None where it does."""
    status = serve.status().applications.get(application.name)
    if status is None:
        return "Serve does not know it yet"
    state, cause = state_of(status)
    if state == "failed":
        raise _failure(application.role, cause)
    if state == "ready":
        return None
    return " ".join(f"it is {status.status} {cause}".split())


def _answers(stub: Any, application: _Application) -> str | None:
    """Why the application does not answer over gRPC yet; None where it does."""
    request = scorer_pb2.DescribeRequest(context=common_pb2.Context())
    try:
        metadata = (("application", application.name), *listen.metadata(os.environ.get(listen.TOKEN_VARIABLE, "")))
        stub.Describe(request, timeout=5.0, metadata=metadata)
    except grpc.RpcError as error:
        return f"its port answers {error.code().name} ({error.details()})"
    return None


def _failure(role: str, text: str) -> NightshiftError:
    """The root cause of a failed start, from Serve's message: it ends with the traceback of the replica."""
    if match := _ERROR_LINE.findall(text):
        sentence = match[-1].strip()
        return RoleError(sentence.removeprefix(f"[{role}] "), role=role)
    return RoleError(f"it failed at its start: {_last_line(text)}", role=role)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if _EXCEPTION_LINE.match(line)]
    return (causes or lines or ["no reason given"])[-1]
