"""``nightshift.Trainer``: a training loop of one's own, while generation, scoring and updates run as services."""

from __future__ import annotations

import atexit
import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nightshift.cli import prepare
from nightshift.client import Client
from nightshift.client.models import Job
from nightshift.config.live import ALIASES, ASYNC, LIVE, SettingsError, why_fixed
from nightshift.trainer_job import Batch, check_job, job_file, merged, rows_of
from nightshift.wire.errors import BadInputError, NightshiftError, RoleError

_ASK_S = 3600.0
#: Steps of a driven job, which ends when its driver says so.
_MANY_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class RolloutOutput:
    """One response to one prompt; T is its number of tokens.

    Attributes:
        prompt_length: tokens of the prompt.
        tokens_generated: T.
        reward: None where the reward function failed; never a 0 in its place.
        reward_latency: seconds of the reward's call.
        critic_latency: seconds of the critic's call; 0 without a critic.
        peak_memory: bytes of the trainer at its last step; None before the first.
        weight_versions: policy versions of its tokens, ``<run>/<lineage>/<step>``, in order.
        trace_id: of its prompt group.
        response_ids: [T] int32, as sampled.
        logprobs: [T] float32, of the distribution that was sampled from.
        values: [T] float32 of the critic, or None.
    """

    sample_id: str
    group_id: str
    trace_id: str
    prompt_length: int
    tokens_generated: int
    response: str
    finish_reason: str
    reward: float | None
    reward_parts: dict[str, float]
    reward_error: str
    reward_latency: float
    critic_latency: float
    peak_memory: int | None
    weight_versions: list[str]
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.uint8]
    values: NDArray[np.float32] | None
    ref_logprobs: NDArray[np.float32] | None


class RolloutBatch(Sequence[RolloutOutput]):
    """The responses to one batch.

    Attributes:
        number: names the batch to the service.
        failed_groups: prompts without a usable response.
    """

    def __init__(self, number: int, outputs: list[RolloutOutput], failed_groups: int) -> None:
        self.number = number
        self.failed_groups = failed_groups
        self._outputs = outputs

    def __getitem__(self, at: Any) -> Any:
        return self._outputs[at]

    def __len__(self) -> int:
        return len(self._outputs)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[samples]; NaN where a sample is unscored."""
        return np.array([np.nan if output.reward is None else output.reward for output in self._outputs])


@dataclass(slots=True)
class Loss:
    """A handle on the loss of a batch, which the trainer service computes when it is read or stepped on.

    Attributes:
        metrics: of the step; empty before it.
        evaluate: asks for the metrics of the loss before its step.
    """

    batch: RolloutBatch
    evaluate: Callable[[RolloutBatch], dict[str, float]] = field(repr=False, compare=False)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def stepped(self) -> bool:
        """Whether a step was made with it."""
        return bool(self.metrics)

    def __float__(self) -> float:
        """The policy's loss: after a step that of the step, before it under the weights as they are.

        Before the step, the trainer service makes a forward pass for it. NaN where the batch has nothing to learn from.

        Raises:
            NightshiftError: a role failed, or the batch was discarded.
        """
        metrics = self.metrics or self.evaluate(self.batch)
        return float(metrics.get("loss/actor", math.nan))


class LiveConfig:
    """Settings by name; what is assigned while the job runs takes effect at the next step boundary."""

    def __init__(self, trainer: Trainer) -> None:
        object.__setattr__(self, "_trainer", trainer)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != ASYNC and ALIASES.get(name, name) not in LIVE:
            reason = why_fixed("model" if name == "model_size" else name)
            raise SettingsError([(name, f"cannot change while the job runs: {reason}")])
        self._trainer._set(name, value)

    def __getattr__(self, name: str) -> Any:
        return self._trainer._get(name)


class Trainer:
    """Trains a policy, with the loop in the caller's hands or not.

    ``for batch in dataloader: outputs = trainer.rollout(batch); loss = trainer.compute_loss(outputs);
    trainer.step(loss)``, or :meth:`fit`. Without ``url`` a service of its own is started on this machine, and ended
    with the trainer; with it, the same code runs against that service.

    Args:
        actor_model: HF id, folder or ``builtin:`` name of the policy.
        critic_model: of the value model, for PPO; None: no critic.
        reward_model: ``path.py:function``, ``grpc://host:port``, or a sequence classifier's HF id or folder.
        reference_model: for the KL term; None: the policy as it was.
        url: of a job service.
        token: of that service.
        config: further sections of the job file, ``{"rollout": {"n": 8}, ...}``.
    """

    def __init__(
        self,
        actor_model: str,
        critic_model: str | None = None,
        reward_model: str = "",
        reference_model: str | None = None,
        *,
        url: str | None = None,
        token: str | None = None,
        config: Mapping[str, Any] | None = None,
        service_command: Sequence[str] = (),
    ) -> None:
        if not reward_model:
            raise BadInputError("a Trainer needs a reward_model", fix="path.py:function, grpc://host:port or an HF id")
        for name, model in (("actor_model", actor_model), ("critic_model", critic_model)):
            if model is not None and "://" in model:
                raise BadInputError(
                    f"{name} is {model!r}, but its weights are trained here and must be at hand", role="trainer",
                    fix="Name an HF id or a folder; reward and reference may be URLs",
                )  # fmt: skip
        self._job_file = job_file(actor_model, critic_model, reward_model, reference_model, config or {})
        check_job(self._job_file)
        self._remote = (url, token) if url is not None else None
        self._command = list(service_command)
        self._service: subprocess.Popen[str] | None = None
        self._folder: Path | None = None  # of the own service
        self._client: Client | None = None
        self._job: Job | None = None
        self._memory: int | None = None
        self._open: dict[int, RolloutBatch] = {}
        self._ahead: list[tuple[Batch, int]] = []  # asked for before the loop came to them
        self.config = LiveConfig(self)

    @staticmethod
    def supported_parallelisms() -> list[str]:
        """What really runs: data parallelism over DeepSpeed ZeRO ranks."""
        return ["data"]

    @property
    def job(self) -> Job | None:
        """The job that is driven; None before the first rollout."""
        return self._client.get(self._job.id) if self._job is not None and self._client is not None else None

    @property
    def debug_mode(self) -> bool:
        """Whether shape, dtype and device of the tensors at each boundary are recorded, from the next step on."""
        return bool(self.config.debug_mode)

    @debug_mode.setter
    def debug_mode(self, value: bool) -> None:
        self.config.debug_mode = value

    def tensors(self, step: int | None = None) -> list[dict[str, Any]]:
        """What debug mode has recorded: one map for each tensor at each boundary.

        Args:
            step: only of this step.

        Returns:
            Maps of step, part, role (who made it), name, dtype, device, and ``shapes``: how many have which shape.
        """
        client, job = self._running()
        return [
            {"step": event.data["step"], "part": event.data["part"], **tensor}
            for event in client.events(job.id, kinds=["tensors"], follow=False)
            for tensor in event.data["tensors"]
            if step is None or event.data["step"] == step
        ]

    # The loop ---------------------------------------------------------------------------------------------------------

    def rollout(self, batch: Batch) -> RolloutBatch:
        """Draws and scores ``rollout.n`` responses to each prompt.

        Args:
            batch: rows with ``prompt`` and what the reward reads, or columns of equal length.

        Raises:
            NightshiftError: names the role that failed, and the fix.
        """
        ahead = next((number for known, number in self._ahead if known is batch), None)
        if ahead is None:
            return self._collect(self._ask(batch))
        self._ahead = [(known, number) for known, number in self._ahead if number != ahead]
        return self._collect(ahead)

    def _ask(self, batch: Batch) -> int:
        """Asks for the responses to a batch; the number under which they come."""
        rows = rows_of(batch)
        client, job = self._started(rows)
        return client.post(job.id, {"kind": "rollout", "rows": rows})

    def dataloader(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, for a loop that gives each of them to :meth:`rollout`.

        With ``use_async_rollout`` the responses to the next batch are asked for before one is given, so that they are
        being drawn while this one is stepped on. Left early, what was asked for is discarded with the loop.

        Raises:
            NightshiftError: a batch cannot be used.
        """
        waiting: list[Batch] = []
        for batch in batches:
            waiting.append(batch)
            self._ahead.append((batch, self._ask(batch)))
            if len(waiting) > int(self.config.use_async_rollout):
                yield waiting.pop(0)
        yield from waiting

    def _collect(self, number: int) -> RolloutBatch:
        client, job = self._running()
        answer = self._answer(client, job, number)
        samples = [self._output(sample) for sample in answer["samples"]]
        made = RolloutBatch(number, samples, int(answer["failed_groups"]))
        self._open[number] = made
        return made

    def rollouts(self, batches: Iterable[Batch]) -> Iterator[RolloutBatch]:
        """The responses to one batch after the other; with ``use_async_rollout`` the next one is already running.

        Raises:
            NightshiftError: names the role that failed, and the fix.
        """
        for batch in self.dataloader(batches):
            yield self.rollout(batch)

    def compute_loss(self, outputs: RolloutBatch) -> Loss:
        """A handle on the loss of these responses; one that is never stepped on is discarded with its batch."""
        return Loss(outputs, self._loss_of)

    def _loss_of(self, outputs: RolloutBatch) -> dict[str, float]:
        client, job = self._running()
        answer = self._answer(client, job, client.post(job.id, {"kind": "loss", "rollout": outputs.number}))
        return {name: value for name, value in answer["metrics"].items() if value is not None}

    def step(self, loss: Loss) -> dict[str, float]:
        """Makes the update; returns the step's metrics, which ``loss`` holds then, too.

        Raises:
            NightshiftError: a step was made with it before, or a role failed.
        """
        client, job = self._running()
        # A loss that was passed over is not coming back: its groups would only grow old.
        for number in [number for number in self._open if number < loss.batch.number]:
            del self._open[number]
            self._answer(client, job, client.post(job.id, {"kind": "discard", "rollout": number}))
        self._open.pop(loss.batch.number, None)
        answer = self._answer(client, job, client.post(job.id, {"kind": "step", "rollout": loss.batch.number}))
        loss.metrics = {name: value for name, value in answer["metrics"].items() if value is not None}
        peak = loss.metrics.get("memory/trainer_peak_bytes")
        self._memory = int(peak) if peak else self._memory
        return loss.metrics

    def fit(self, train_files: Sequence[str] = (), total_steps: int | None = None, **sections: Any) -> Job:
        """Runs the whole loop as a job of its own, and waits for its end.

        Args:
            train_files: parquet or JSONL files; none: those of section ``data`` of ``config``.
            total_steps: None: one pass over the prompts.
            sections: further sections of the job file.

        Raises:
            BadInputError: no file is named.
            RoleError: the job failed.
        """
        job = merged(self._job_file, sections)
        files = [*train_files] or (job.get("data") or {}).get("train_files")
        if not files:
            fix = "trainer.fit([FILE]), or Trainer(..., config={'data': {'train_files': [FILE]}})"
            raise BadInputError("fit needs prompts, and no file of them is named", role="job", fix=fix)
        job = merged(job, {"data": {"train_files": [str(Path(file).resolve()) for file in files]}})
        if total_steps is not None:
            job = merged(job, {"trainer": {"total_steps": total_steps}})
        client = self._connected()
        done = client.wait(client.submit(job).id)
        if done.state != "succeeded":
            raise RoleError(done.error or f"the job is {done.state}", role="job")
        return done

    def save(self, folder: str | Path) -> Path:
        """Ends the loop, and fetches the policy as an HF folder: a service of the trainer's own keeps nothing."""
        client, job = self._running()
        self._end_session()
        return client.export(job.id, folder)

    def close(self) -> None:
        """Ends the loop and, where there is one, the trainer's own service; calling it again is harmless."""
        whole = False
        try:
            self._end_session()
            ended = self.job
            whole = ended is None or ended.state != "failed"
        finally:
            if self._client is not None:
                self._client.close()
                self._client = None
            if self._service is not None:
                self._service.send_signal(signal.SIGTERM)
                self._service.wait(60)
                if self._service.stdout is not None:
                    self._service.stdout.close()
                self._service = None
            if self._folder is not None and whole:  # what a failed job wrote stays, for its logs
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None
            atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # The service ------------------------------------------------------------------------------------------------------

    def _end_session(self) -> None:
        client, job = self._client, self._job
        if client is None or job is None or client.get(job.id).has_ended:
            return
        if client.get(job.id).state == "running":
            client.post(job.id, {"kind": "close"})
        else:
            client.cancel(job.id)
        client.wait(job.id, _ASK_S)

    def _connected(self) -> Client:
        if self._client is None:
            if self._remote is not None:
                self._client = Client(*self._remote)
            else:
                self._client = self._own_service()
            atexit.register(self.close)
        return self._client

    def _own_service(self) -> Client:
        prepare.check_installation()
        folder = self._folder = Path(tempfile.mkdtemp(prefix="nightshift-"))
        arguments = ["--data-dir", str(folder), "--port", "0", "--json", "--allow-path", "/", *self._command]
        log = (folder / "service.log").open("w")
        try:
            self._service = subprocess.Popen(
                prepare.module("orchestrator.api", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=prepare.environment(),
                text=True,
                start_new_session=True,  # Ctrl-C goes to the caller's loop, which ends the job in order
            )
        finally:
            log.close()
        assert self._service.stdout is not None
        line = self._service.stdout.readline()
        if not line:
            text = (folder / "service.log").read_text().strip().splitlines()
            raise RoleError(f"the service did not start: {text[-1] if text else 'no output'}", role="orchestrator")
        found = json.loads(line)
        return Client(found["url"], Path(found["token_file"]).read_text().strip())

    def _started(self, rows: list[dict[str, Any]]) -> tuple[Client, Job]:
        client = self._connected()
        if self._job is None:
            # Prompts for the weights' probe are all that a driven job reads of it.
            with tempfile.TemporaryDirectory(prefix="nightshift-") as folder:
                path = Path(folder) / "first_batch.jsonl"
                path.write_text("".join(json.dumps(row) + os.linesep for row in rows), encoding="utf-8")
                steps = {"total_steps": _MANY_STEPS, "test_freq": 0}
                job = merged({"trainer": steps, "data": {"train_files": [str(path)]}}, self._job_file)
                self._job = client.submit(job, session=True)
        return client, self._job

    def _running(self) -> tuple[Client, Job]:
        if self._client is None or self._job is None:
            raise NightshiftError("nothing runs yet", role="job", fix="Call trainer.rollout(batch) first")
        return self._client, self._job

    def _answer(self, client: Client, job: Job, number: int) -> dict[str, Any]:
        answer = client.answer(job.id, number, _ASK_S)
        if error := answer.get("error"):
            raise RoleError(error["message"], role=error["role"], fix=error["fix"])
        return answer

    def _output(self, sample: dict[str, Any]) -> RolloutOutput:
        return RolloutOutput(
            sample_id=sample["sample_id"],
            group_id=sample["group_id"],
            trace_id=sample["trace_id"],
            prompt_length=len(sample["prompt_ids"]),
            tokens_generated=len(sample["response_ids"]),
            response=sample["response"],
            finish_reason=sample["finish_reason"],
            reward=sample["reward"],
            reward_parts=sample["reward_parts"],
            reward_error=sample["reward_error"],
            reward_latency=sample["reward_seconds"],
            critic_latency=sample["critic_seconds"],
            peak_memory=self._memory,
            weight_versions=sample["weight_versions"],
            prompt_ids=sample["prompt_ids"],
            response_ids=sample["response_ids"],
            logprobs=sample["logprobs"],
            loss_mask=sample["loss_mask"],
            values=sample["values"],
            ref_logprobs=sample["ref_logprobs"],
        )

    def _set(self, name: str, value: Any) -> None:
        if self._job is not None and self._client is not None:
            self._client.set(self._job.id, {name: value})
            return
        if name == ASYNC:
            self._job_file = merged(self._job_file, {"pipeline": {"max_staleness": 1 if value else 0}})
            return
        section, _, key = ALIASES.get(name, name).partition(".")
        self._job_file = merged(self._job_file, {section: {key: value}})

    def _get(self, name: str) -> Any:
        from nightshift.config import JobSpec
        from nightshift.config.live import get

        key = "pipeline.max_staleness" if name == ASYNC else ALIASES.get(name, name)
        if self._job is not None and self._client is not None:
            found = self._client.settings(self._job.id)
            present = {item["key"]: item["value"] for item in found["settings"]} | found["pending"]
        else:
            spec = JobSpec.model_validate(merged({"data": {"train_files": ["-"]}}, self._job_file))
            present = {key: get(spec, key)} if key in LIVE else {}
        if key not in present:
            raise AttributeError(f"there is no setting {name!r}; there are {', '.join(sorted([*ALIASES, ASYNC]))}")
        return present[key] != 0 if name == ASYNC else present[key]
