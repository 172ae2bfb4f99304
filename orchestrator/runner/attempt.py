"""One attempt at a run, from where it stands to its end or to the loss of the trainer: connects the roles and runs the
pipeline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nightshift.config import JobSpec
from nightshift.data import PromptSet, Tokenizer
from nightshift.wire.errors import RoleError
from nightshift.wire.events import EventLog
from nightshift.wire.mailbox import Mailbox
from nightshift.wire.restart_request import ask_restart
from nightshift.wire.scoring import SequenceInput
from orchestrator.runner.admission import Admission
from orchestrator.runner.books import Books
from orchestrator.runner.checkpoints import Checkpoints
from orchestrator.runner.connect import connect_trainer
from orchestrator.runner.critic import Critic
from orchestrator.runner.engine import EngineAddress
from orchestrator.runner.evaluate import Evaluator
from orchestrator.runner.exporter import Exporter
from orchestrator.runner.fleet import Fleet, Limits
from orchestrator.runner.frozen import FrozenModel, TokenScorer
from orchestrator.runner.group import GroupRunner
from orchestrator.runner.health import PROBE_LIMITS
from orchestrator.runner.inputs import Inputs, make_cursor, rows_per_epoch, steps_sentence
from orchestrator.runner.ledger import GroupState
from orchestrator.runner.lent import Lent
from orchestrator.runner.live import LiveSettings
from orchestrator.runner.mixed import MixedScorer
from orchestrator.runner.pipeline import Pipeline
from orchestrator.runner.refill import Refill
from orchestrator.runner.rollouts import drop_rollouts_after
from orchestrator.runner.scorer import ScorerClient
from orchestrator.runner.server import Proof
from orchestrator.runner.services import ScorerAddress, Services, TrainerAddress, read_services
from orchestrator.runner.session import SessionPipeline
from orchestrator.runner.spool import Spool
from orchestrator.runner.start import Start, take_up, walk_on
from orchestrator.runner.stepper import Stepper
from orchestrator.runner.tracing import Tracing
from orchestrator.runner.tracking import open_tracking
from orchestrator.runner.trainer import TrainerClient

#: Sequences, and tokens of each, on which servers prove that they hold the published weights.
_PROBES, _PROBE_TOKENS = 2, 48


class Attempt:
    """The roles of a run, connected.

    Attributes:
        step: steps in the trainer's weights, once the pipeline has ended.
        pipeline: None until it is about to run.
    """

    def __init__(
        self,
        spec: JobSpec,
        run_dir: Path,
        events: EventLog,
        inputs: Inputs,
        start: Start,
        books: Books,
        checkpoints: Checkpoints,
        tracing: Tracing,
        exporter: Exporter,
    ) -> None:
        self.spec = spec
        self.run_dir = run_dir
        self.run_id = run_dir.name
        self.events = events
        self.step = start.step
        self._inputs = inputs
        self._start = start
        self._books = books
        self._checkpoints = checkpoints
        self._tracing = tracing
        self._exporter = exporter
        self._closing: list[Any] = []
        self.pipeline: Pipeline | None = None
        self._stopping = False

    def stop(self) -> bool:
        """Asks for an end after the step in progress; False where no step can be in progress yet."""
        self._stopping = True
        if self.pipeline is None:
            return False
        self.pipeline.stop()
        return True

    async def close(self) -> None:
        """Closes all connections."""
        for item in self._closing:
            await item.close()
        self._closing = []

    async def run(self, services: Services, address: TrainerAddress) -> bool:
        """Runs to the end of the job; returns False where :meth:`stop` ended it earlier.

        Raises:
            TrainerLostError: the trainer's weights are gone.
            NightshiftError: a role failed for good.
        """
        spec, start, books, inputs = self.spec, self._start, self._books, self._inputs
        live = LiveSettings(self.run_dir, spec, self.events)
        live.restore()  # before anything reads what it changes
        train, total_steps, tracing = inputs.train, inputs.total_steps, self._tracing
        trainer = connect_trainer(address, spec, self.run_dir, start.job_trace_id)
        self._closing.append(trainer)
        rewards, models, critic_client = self._scorers(services)
        self._closing += [client for _, _, client in rewards] + list(models.values())
        self._closing += [critic_client] if critic_client else []
        scoring: dict[str, TokenScorer] = {**models, **({"critic": critic_client} if critic_client else {})}
        vocabulary = await self._check_roles(trainer, rewards, scoring, inputs.tokenizer)
        await trainer.load(start.state_dir, str(start.lineage.version(start.step)))
        critic = await self._load_critic(address, critic_client)

        fleet = self._fleet(services, train, vocabulary)
        self._closing.append(fleet)
        spool = Spool(self.run_dir / "spool")
        self._closing.append(_Closer(spool.close))
        runner = GroupRunner(
            spec,
            self.run_id,
            inputs.tokenizer,
            fleet,
            rewards,
            models.get("reference"),
            tracing,
            teacher=models.get("teacher"),
            critic=critic_client,
        )
        cursor, driven = make_cursor(spec, train), Mailbox(self.run_dir).exists
        if not driven:  # else its prompts come with its requests
            walk_on(cursor, start)
        resumed = await take_up(books, spool, start, train, tracing, spec)
        admission = Admission(
            spec.pipeline.max_staleness,
            spec.rollout.batch_size,
            total_steps,
            finished_groups=books.ledger.counts[GroupState.TRAINED],
            finished_steps=start.step,
            max_in_flight=spec.pipeline.max_groups_in_flight,
        )
        tracking = open_tracking(self.run_dir, self.run_id, spec.tracking)
        self._closing.append(_Closer(tracking.close))
        tracking.drop_after(start.step)
        drop_rollouts_after(self.run_dir / "rollouts", start.step)
        stepper = Stepper(
            spec,
            self.run_dir,
            total_steps,
            lineage=start.lineage,
            step=start.step,
            trainer=trainer,
            fleet=fleet,
            books=books,
            spool=spool,
            evaluator=Evaluator(spec, self.run_id, inputs.tokenizer, inputs.test, fleet, rewards, tracing),
            checkpoints=self._checkpoints,
            tracking=tracking,
            tracing=tracing,
            events=self.events,
            admission=admission,
            probe=_probe(train),
            cursor_state=lambda: cursor.state() | ({"driven": True} if driven else {}),
            generating=runner.busy,
            manifest=start.manifest,
            critic=critic,
        )
        self._closing.insert(0, stepper)  # it uses all the others
        pipeline = (SessionPipeline if driven else Pipeline)(
            spec,
            total_steps,
            prompts=train.prompts,
            cursor=cursor,
            books=books,
            fleet=fleet,
            runner=runner,
            stepper=stepper,
            spool=spool,
            tracing=tracing,
            events=self.events,
            admission=admission,
        )
        pipeline.live = live
        if isinstance(pipeline, SessionPipeline):
            pipeline.tokenizer, pipeline.run_dir = inputs.tokenizer, self.run_dir
        self._exporter.watch(
            services, total_steps, books=books, fleet=fleet, runner=runner, stepper=stepper, pipeline=pipeline
        )
        rows = rows_per_epoch(spec, train)
        self.events.append(
            "job",
            state="running",
            steps=total_steps,
            lineage=start.lineage.number,
            step=start.step,
            detail=f"{train.summary()}; {steps_sentence(rows, spec.rollout.batch_size, total_steps)}",
        )
        fleet.start()
        try:
            await stepper.begin()
            self.pipeline = pipeline
            if self._stopping:
                pipeline.stop()
            finished = await pipeline.run(resumed)
            await stepper.checkpoint()
        finally:
            self.step = stepper.step
        self._summarise(stepper)
        return finished

    async def _load_critic(self, address: TrainerAddress, scorer: ScorerClient | None) -> Critic | None:
        """Connects the critic's trainer and brings it to the step where the run goes on."""
        if self.spec.scorers.critic is None:
            return None
        if scorer is None or not address.critic_url:
            raise RoleError("the job has a critic, and services.json names none", role="critic", fix="Start it again")
        trainer = connect_trainer(address, self.spec, self.run_dir, self._start.job_trace_id, critic=True)
        self._closing.append(trainer)
        critic = Critic(self.spec, trainer, scorer)
        step = self._start.step
        state_dir = str(self._checkpoints.critic_dir(step)) if self._start.state_dir else ""
        await critic.load(state_dir, str(self._start.lineage.version(step)))
        return critic

    def _scorers(
        self, services: Services
    ) -> tuple[list[tuple[str, float, ScorerClient]], dict[str, TokenScorer], ScorerClient | None]:
        """Clients of the rewards, of the frozen models by role, and of the critic."""
        scorers, pipeline = self.spec.scorers, self.spec.pipeline

        def client(role: str, address: ScorerAddress, sample_s: float = 0.0) -> ScorerClient:
            return ScorerClient(
                role,
                address.url,
                address.application,
                token=address.token,
                run_id=self.run_id,
                job_trace_id=self._start.job_trace_id,
                timeout_s=scorers.timeout_s,
                sample_s=sample_s,
                away_s=pipeline.role_timeout_s,
                # Which groups fall into one call is a matter of timing, and the shape of a batch moves the last bits.
                batch_samples=1 if pipeline.deterministic else scorers.batch_samples,
                batch_wait_s=scorers.batch_wait_ms / 1000,
            )

        def model(role: str, address: ScorerAddress) -> TokenScorer:
            if not address.url.startswith(("http://", "https://")):
                return client(role, address)
            token = os.environ.get(f"NIGHTSHIFT_{role.upper()}_TOKEN", "")
            return FrozenModel(role, address.url, token, timeout_s=scorers.timeout_s, away_s=pipeline.role_timeout_s)

        # Samples that hang are replaced within their limit; steadily slow ones may take it one after the other.
        rewards = [
            (address.name, reward.weight, client("reward", address, reward.timeout_s))
            for address, reward in zip(services.rewards, self.spec.rewards, strict=True)
        ]
        frozen = {"reference": services.reference, "teacher": services.teacher}
        models = {role: model(role, address) for role, address in frozen.items() if address is not None}
        if (mixed := scorers.reference.mixed_with) and "reference" in models:
            others = [model("reference", ScorerAddress("reference", other.url, "reference")) for other in mixed]
            shares = [other.weight for other in mixed]
            models["reference"] = MixedScorer([models["reference"], *others], [1.0 - sum(shares), *shares])
        return rewards, models, client("critic", services.critic) if services.critic is not None else None

    async def _check_roles(
        self,
        trainer: TrainerClient,
        rewards: Sequence[tuple[str, float, ScorerClient]],
        models: dict[str, TokenScorer],
        tokenizer: Tokenizer,
    ) -> int:
        """Checks that the roles fit together; the number of the policy's tokens."""
        described = await trainer.describe()
        if described.vocab_size < tokenizer.vocab_size:
            raise RoleError(
                f"the model has {described.vocab_size} tokens, the tokenizer {tokenizer.vocab_size}", role="trainer"
            )
        for _, _, client in rewards:
            await client.describe()
        for role, scorer in models.items():
            answer = await scorer.describe()
            if answer.vocab_size and answer.vocab_size != described.vocab_size:
                raise RoleError(
                    f"the {role} has {answer.vocab_size} tokens, the policy {described.vocab_size}",
                    role=role,
                    fix=f"The {role} must use the policy's vocabulary",
                )
        return int(described.vocab_size)

    def _fleet(self, services: Services, train: PromptSet, vocabulary: int) -> Fleet:
        rollout, pipeline = self.spec.rollout, self.spec.pipeline
        drains = pipeline.weight_update == "drain"
        lent = Lent(self.run_dir, rollout.fleet) if rollout.fleet is not None else None

        def refresh() -> list[EngineAddress] | None:
            current = read_services(self.run_dir)
            if lent is not None:  # what is asked back must be let go of, whatever becomes of the other roles
                return lent.addresses(*(current or services).lent)
            return current.rollout if current else None

        return Fleet(
            refresh() or services.rollout,
            events=self.events,
            refresh=refresh,
            proof=Proof(
                _probe(train),
                PROBE_LIMITS[rollout.dtype],
                "wait" if drains else "keep",
                keep_cache=pipeline.keep_cache and not drains and not pipeline.deterministic,
                sleeps=rollout.sleep_mode,
            ),
            limits=Limits(
                request_timeout_s=rollout.request_timeout_s,
                away_s=pipeline.role_timeout_s,
                stall_timeout_s=rollout.stall_timeout_s,
                retries=pipeline.retries,
                # A rest that another server draws is no function of the seed.
                flush_tokens=0 if pipeline.deterministic else rollout.flush_tokens,
                max_staleness=pipeline.max_staleness,
                vocabulary=vocabulary,
            ),
            refill=Refill(rollout.n, adaptive=rollout.refill == "adaptive" and not pipeline.deterministic),
            ask_restart=lambda address, cause: ask_restart(self.run_dir, address.name, address.incarnation, cause),
            lending=lent,
        )

    def _summarise(self, stepper: Stepper) -> None:
        metrics = {
            "overlap_share": stepper.overlap_share(),
            "training_seconds": stepper.ended - stepper.began,
        }
        self.events.append(
            "summary",
            step=stepper.step,
            policy_version=str(stepper.lineage.version(stepper.step)),
            metrics=metrics,
            ledger=self._books.ledger.balance(),
            job_trace_id=self._tracing.job_trace_id,
            time_ended=time.time(),
        )


class _Closer:
    def __init__(self, close: Any) -> None:
        self._close = close

    async def close(self) -> None:
        self._close()


def _probe(train: PromptSet) -> list[SequenceInput]:
    probes = []
    for prompt in train.prompts[:_PROBES]:
        ids = prompt.prompt_ids[:_PROBE_TOKENS]
        cut = max(1, len(ids) // 2)
        if len(ids) > cut:
            probes.append(SequenceInput(id=str(prompt.row_id), prompt_ids=ids[:cut], response_ids=ids[cut:]))
    return probes
