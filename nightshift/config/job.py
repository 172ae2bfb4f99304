"""The job file as one model."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, model_validator

from nightshift.config.algorithm import POLICY_LOSSES, PREFERENCE_LOSSES, AlgorithmConfig
from nightshift.config.base import Section
from nightshift.config.checkpoint import CheckpointConfig
from nightshift.config.data import DataConfig
from nightshift.config.model import ModelConfig
from nightshift.config.pipeline import PipelineConfig
from nightshift.config.resources import ResourcesConfig
from nightshift.config.rewards import RewardConfig
from nightshift.config.rollout import RolloutConfig
from nightshift.config.scorers import ScorersConfig
from nightshift.config.tracking import TrackingConfig
from nightshift.config.trainer import TrainerConfig
from nightshift.wire.errors import BadInputError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Estimators that need a critic.
VALUE_ESTIMATORS = frozenset({"gae", "vtrace"})
#: Estimators that compare the samples of one prompt: with one sample there is nothing to compare.
GROUP_ESTIMATORS = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"})


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(
            f"name {name[:80]!r} must be 1 to 64 letters, digits, '.', '_' or '-', and start with a letter or a digit"
        )
    return name


class JobSpec(Section):
    """A whole job: what is trained, on what, how, and with which resources."""

    name: Annotated[str, AfterValidator(_check_name)]
    """Name of the job; part of the run's folder."""

    model: ModelConfig
    data: DataConfig
    rewards: list[RewardConfig]
    algorithm: AlgorithmConfig = AlgorithmConfig()
    pipeline: PipelineConfig = PipelineConfig()
    rollout: RolloutConfig = RolloutConfig()
    scorers: ScorersConfig = ScorersConfig()
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    resources: ResourcesConfig = ResourcesConfig()

    @model_validator(mode="before")
    @classmethod
    def _allow_no_rewards(cls, values: Any) -> Any:
        """Jobs that learn from pairs or from a teacher need no rewards: the key may be left out."""
        algorithm = values.get("algorithm") if isinstance(values, dict) else None
        if isinstance(algorithm, dict) and "rewards" not in values:
            pairs = algorithm.get("policy_loss") in PREFERENCE_LOSSES
            if pairs or algorithm.get("estimator") == "distillation":
                return {**values, "rewards": []}
        return values

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        rollout, trainer = self.rollout, self.trainer
        if self.algorithm.estimator in GROUP_ESTIMATORS and rollout.n < 2:
            raise ValueError(
                f"rollout.n is {rollout.n}, but the estimator {self.algorithm.estimator!r} compares the samples of one "
                "prompt: set rollout.n to 2 or more, or choose another algorithm.estimator"
            )
        self._check_roles()
        self._check_hosts()
        if rollout.top_p != 1.0 or rollout.top_k != -1:
            raise ValueError(
                "rollout.top_p and rollout.top_k cut the sampled distribution, which biases the ratio between trainer "
                "and sampler: set top_p to 1.0 and top_k to -1"
            )
        if self.pipeline.deterministic and self.pipeline.max_staleness != 0:
            raise ValueError("pipeline.deterministic needs pipeline.max_staleness 0")
        _check_queues(self)
        self._check_fleet()
        self._check_sleep()
        samples = rollout.batch_size * rollout.n
        if samples % trainer.ranks:
            raise ValueError(
                f"rollout.batch_size x rollout.n is {samples}, which {trainer.ranks} trainer.ranks do not divide"
            )
        if rollout.min_response_length > rollout.max_response_length:
            raise ValueError(
                f"rollout.min_response_length {rollout.min_response_length} is more than rollout.max_response_length "
                f"{rollout.max_response_length}"
            )
        if trainer.autocast and trainer.dtype != "float32":
            raise ValueError("trainer.autocast is for trainer.dtype float32")
        if trainer.padding_free and self.model.attn_implementation != "sdpa":
            raise ValueError("trainer.padding_free needs model.attn_implementation sdpa")
        names = [reward.name or reward.type for reward in self.rewards]
        if len(self.rewards) > 1 and len(set(names)) < len(names):
            raise ValueError(f"several rewards need different names, got {names}")
        return self

    def _check_fleet(self) -> None:
        fleet, rollout = self.rollout.fleet, self.rollout
        if fleet is None:
            return
        if rollout.url is not None or rollout.servers > 1:
            other = "rollout.url" if rollout.url is not None else "rollout.servers"
            raise ValueError(
                f"rollout.fleet {fleet.name!r} lends its servers to the job, and {other} names others: leave one of "
                "them out"
            )
        if self.is_preference:
            raise ValueError(
                f"policy_loss {self.algorithm.policy_loss!r} trains on pairs and samples nothing: leave rollout.fleet "
                "out"
            )
        if self.pipeline.deterministic:
            raise ValueError(
                "pipeline.deterministic cannot hold with rollout.fleet, since servers come and go with what other jobs "
                "do: leave one of them out"
            )
        if rollout.weight_transfer == "ipc":
            raise ValueError("rollout.weight_transfer ipc reaches no server of rollout.fleet: set it to auto")

    def _check_sleep(self) -> None:
        if not self.rollout.sleep_mode:
            return
        if self.is_preference or not self.rollout.own_servers:
            raise ValueError(
                "rollout.sleep_mode is for servers that are started for the job beside its trainer, and this job "
                "starts none: leave it out"
            )
        if self.pipeline.max_staleness != 0:
            raise ValueError(
                "rollout.sleep_mode has the servers sleep while the trainer works, so that nothing can be generated "
                "beside it: set pipeline.max_staleness to 0, or leave rollout.sleep_mode out"
            )

    def _check_roles(self) -> None:
        algorithm, critic = self.algorithm, self.scorers.critic
        teacher = self.scorers.teacher.model if self.scorers.teacher else ""
        frozen = {"reference": self.scorers.reference.model, "teacher": teacher}
        for role, model in frozen.items():
            if (model or "").startswith(("http://", "https://")) and self.rollout.temperature != 1.0:
                raise ValueError(
                    f"scorers.{role}.model is a vLLM server, which gives log-probs at temperature 1 alone, and "
                    f"rollout.temperature is {self.rollout.temperature:g}: set that to 1, or give a folder"
                )
        if not self.rewards and not self.is_preference and algorithm.estimator != "distillation":
            raise ValueError("'rewards' is missing: give a list with at least one reward")
        if self.is_preference:
            if critic is not None:
                raise ValueError(f"policy_loss {algorithm.policy_loss!r} trains on pairs: it has no use for a critic")
            return
        if algorithm.estimator in VALUE_ESTIMATORS and critic is None:
            raise ValueError(
                f"algorithm.estimator {algorithm.estimator!r} needs the values of a critic: give scorers.critic "
                "(critic: {} takes all defaults), or choose another algorithm.estimator"
            )
        if algorithm.estimator == "vtrace" and POLICY_LOSSES.get(algorithm.policy_loss, False):
            raise ValueError(
                f"algorithm.policy_loss {algorithm.policy_loss!r} corrects for the sampler, which the advantages of "
                "vtrace do already: set it to ppo_clip_proximal"
            )
        if algorithm.estimator == "distillation" and self.scorers.teacher is None:
            raise ValueError("algorithm.estimator 'distillation' needs a teacher: give scorers.teacher.model")
        buffer = algorithm.overlong_buffer
        if buffer is not None and buffer > self.rollout.max_response_length:
            raise ValueError(
                f"algorithm.overlong_buffer {buffer} is more than rollout.max_response_length "
                f"{self.rollout.max_response_length}"
            )
        if algorithm.filter_zero_spread and self.rollout.n < 2:
            raise ValueError("algorithm.filter_zero_spread compares a prompt's samples: set rollout.n to 2 or more")
        if critic is not None and self.rollout.batch_size * self.rollout.n % critic.ranks:
            raise ValueError(
                f"rollout.batch_size x rollout.n is {self.rollout.batch_size * self.rollout.n}, which "
                f"{critic.ranks} scorers.critic.ranks do not divide"
            )

    def _check_hosts(self) -> None:
        agents = self.resources.agents
        if self.scorers.critic is not None and agents.trainer != agents.scorers:
            raise ValueError(
                "the critic takes its weights from a folder of its trainer's: resources.agents.trainer and "
                "resources.agents.scorers must be the same with scorers.critic"
            )
        if agents.trainer is None or self.is_preference:
            return
        if self.rollout.own_servers:
            raise ValueError(
                "resources.agents.trainer is another host, whose weights only servers that are named by rollout.url "
                "or lent by rollout.fleet can take: give rollout.url"
            )
        if self.rollout.weight_transfer not in ("auto", "http"):
            raise ValueError(
                f"rollout.weight_transfer is {self.rollout.weight_transfer}, which does not leave the trainer's host "
                "(resources.agents.trainer): set it to http"
            )

    @property
    def is_preference(self) -> bool:
        """Whether the job trains on pairs of a chosen and a rejected response, and samples nothing."""
        return self.algorithm.is_preference

    @property
    def group_bytes(self) -> int:
        """Bytes that the experience of one prompt group may come to: ids, log-probs of policy and reference, mask."""
        return self.rollout.n * (4 * self.data.max_prompt_length + 13 * self.rollout.max_response_length)

    @property
    def needs_reference(self) -> bool:
        """Whether the reference model is started and asked."""
        return self.algorithm.kl_coef > 0 or self.is_preference

    @property
    def needs_teacher(self) -> bool:
        """Whether the teacher is started and asked."""
        return self.scorers.teacher is not None and self.algorithm.estimator == "distillation"

    def steps_for(self, prompts: int) -> int:
        """Optimiser steps of a run over so many prompts an epoch (:func:`nightshift.data.cursor.epoch_rows`).

        Prompts that do not fill a batch are carried over into the next epoch, and left out after the last one.

        Raises:
            BadInputError: the prompts do not fill one batch.
        """
        if self.trainer.total_steps is not None:
            return self.trainer.total_steps
        steps = prompts * self.trainer.total_epochs // self.rollout.batch_size
        if steps < 1:
            raise BadInputError(
                f"{prompts} prompts in {self.trainer.total_epochs} epochs do not fill one batch of "
                f"{self.rollout.batch_size}",
                role="job",
                fix="Lower rollout.batch_size, or set trainer.total_steps",
            )
        return steps


def _check_queues(spec: JobSpec) -> None:
    """Refuses sizes of queues with which no batch would ever be complete."""
    batch, pipeline = spec.rollout.batch_size, spec.pipeline
    room, wanted = pipeline.buffer_mib * 2**20, batch * spec.group_bytes
    if wanted > room:
        raise ValueError(
            f"pipeline.buffer_mib {pipeline.buffer_mib} holds {room // spec.group_bytes} prompt groups of up to "
            f"{spec.group_bytes} bytes, but only a whole batch of {batch} empties it again: that bound could only be "
            f"kept by waiting for ever. Set pipeline.buffer_mib to {-(-wanted // 2**20)} or more, or lower "
            "rollout.batch_size, rollout.n or rollout.max_response_length"
        )
    cap = pipeline.max_groups_in_flight
    if pipeline.deterministic and cap is not None and cap < batch:
        raise ValueError(
            f"pipeline.deterministic starts the {batch} prompt groups of a batch at once, and "
            f"pipeline.max_groups_in_flight {cap} never lets it: set it to {batch} or more, or to null"
        )
