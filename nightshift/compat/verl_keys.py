"""What each key of a verl configuration means for a job file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one key becomes.

    Attributes:
        values: keys of the job file and their values.
        same: True where nothing has to be set, because a job does what the key asks for anyway.
        note: why, or what else to know.
    """

    values: dict[str, Any] = field(default_factory=dict)
    same: bool = False
    note: str = ""


Flat = Mapping[str, Any]
Rule = Callable[[Any, Flat], Outcome]


def to(target: str, note: str = "") -> Rule:
    """The same value under another key; null leaves the default."""
    return lambda value, flat: Outcome({} if value is None else {target: value}, value is None, note)


def choose(target: str, choices: Mapping[Any, Any], otherwise: str) -> Rule:
    """A value by its name; other names are not supported."""

    def rule(value: Any, flat: Flat) -> Outcome:
        if value in choices:
            return Outcome({target: choices[value]})
        return Outcome(note=f"{otherwise}; there are {', '.join(map(str, choices))}")

    return rule


def only(expected: tuple[Any, ...], note: str) -> Rule:
    """A key that a job cannot change: fine where it says what a job does anyway."""
    return lambda value, flat: Outcome(same=True) if value in expected else Outcome(note=note)


def no(note: str) -> Rule:
    """Not supported, whatever the value."""
    return lambda value, flat: Outcome(note=note)


def same(note: str) -> Rule:
    """Nothing has to be set."""
    return lambda value, flat: Outcome(same=True, note=note)


def frequency(target: str, note: str = "") -> Rule:
    """Steps between two of something; verl's -1 for never is 0."""
    return lambda value, flat: Outcome({target: max(0, int(value))}, note=note)


def listed(target: str) -> Rule:
    """A list of files; a single one may stand alone."""

    def rule(value: Any, flat: Flat) -> Outcome:
        if value is None:
            return Outcome(same=True)
        return Outcome({target: [str(item) for item in value] if isinstance(value, list) else [str(value)]})

    return rule


def _estimator(value: Any, flat: Flat) -> Outcome:
    names = {
        "gae": "gae",
        "grpo": "grpo",
        "rloo": "rloo",
        "reinforce_plus_plus": "reinforce_plus_plus",
        "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    }
    name = str(getattr(value, "value", value)).lower()
    if name not in names:
        return Outcome({"algorithm.estimator": "grpo"}, note=f"there is no {name!r}; grpo stands in for it")
    if name == "grpo" and flat.get("algorithm.norm_adv_by_std_in_grpo") is False:
        return Outcome({"algorithm.estimator": "dr_grpo"}, note="without the standard deviation it is Dr. GRPO")
    return Outcome({"algorithm.estimator": names[name]})


def _ranks(value: Any, flat: Flat) -> Outcome:
    nodes = int(flat.get("trainer.nnodes") or 1)
    note = "ranks of DeepSpeed ZeRO" + (f"; of the {nodes} nodes one is used" if nodes > 1 else "")
    return Outcome({"trainer.ranks": max(1, int(value))}, note=note)


def _kl_number(value: Any, flat: Flat) -> Outcome:
    """The small form's ``kl_penalty`` is a coefficient; the full form's is the name of an estimator."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        kl = {"algorithm.kl_coef": float(value)}
        if value:
            kl |= {"algorithm.kl_in": "reward", "algorithm.kl_estimator": "k1"}  # type: ignore[dict-item]
        return Outcome(kl, note="a penalty on each token's reward, as verl's PPO has it")
    return Outcome(note="must be a number in this form")


_KL = {"kl": "k1", "k1": "k1", "abs": None, "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def _kl_kind(switch: str) -> Rule:
    def rule(value: Any, flat: Flat) -> Outcome:
        if not flat.get(switch):
            return Outcome(same=True, note=f"not used: {switch} is off")
        name = _KL.get(str(value).rstrip("+"))
        if name is None:
            return Outcome(note=f"there is no estimator {value!r}; k3 is taken")
        return Outcome({"algorithm.kl_estimator": name})

    return rule


def _kl_coef(switch: str, where: str) -> Rule:
    def rule(value: Any, flat: Flat) -> Outcome:
        if not flat.get(switch):
            return Outcome(same=True, note=f"not used: {switch} is off")
        return Outcome({"algorithm.kl_coef": value, "algorithm.kl_in": where})

    return rule


def _clip(value: Any, flat: Flat) -> Outcome:
    return Outcome({"algorithm.clip_low": value, "algorithm.clip_high": value})


def _mini_batch(value: Any, flat: Flat) -> Outcome:
    batch = flat.get("data.train_batch_size")
    if batch is None or value == batch:
        return Outcome(same=True, note="one update for each batch")
    return Outcome(
        note=f"each batch of {batch} prompts makes one update; set data.train_batch_size to {value} for as many"
    )


def _micro(target: str) -> Rule:
    def rule(value: Any, flat: Flat) -> Outcome:
        return Outcome(same=True) if value is None else Outcome({target: value})

    return rule


def _tokens(value: Any, flat: Flat) -> Outcome:
    if not flat.get("actor_rollout_ref.actor.use_dynamic_bsz"):
        return Outcome(same=True, note="not used: use_dynamic_bsz is off")
    return Outcome({"trainer.max_tokens_per_micro_batch": value})


def _truncation(value: Any, flat: Flat) -> Outcome:
    if flat.get("data.filter_overlong_prompts"):
        return Outcome({"data.overlong_prompts": "drop"}, note="filter_overlong_prompts leaves longer ones out first")
    if value in ("error", "left"):
        return Outcome({"data.overlong_prompts": value})
    return Outcome(note="prompts are refused, dropped, or keep their last tokens")


def _overlong(value: Any, flat: Flat) -> Outcome:
    return Outcome({"data.overlong_prompts": "drop"}) if value else Outcome(same=True)


def _loggers(value: Any, flat: Flat) -> Outcome:
    names = value if isinstance(value, list) else [value]
    unknown = [name for name in names if name not in ("console", "tensorboard", "wandb", "mlflow")]
    values: dict[str, Any] = {"tracking.tensorboard": "tensorboard" in names}
    project = str(flat.get("trainer.project_name") or "verl")
    if "wandb" in names:
        values["tracking.wandb"] = project
    note = f"not supported: {', '.join(map(str, unknown))}" if unknown else ""
    return Outcome(values, note=note or "metrics.jsonl and the console are always written")


def _device(value: Any, flat: Flat) -> Outcome:
    return Outcome({"resources.device": value}) if value in ("cpu", "cuda") else Outcome(note="cpu or cuda")


def _critic(target: str) -> Rule:
    return to(f"scorers.critic.{target}")


def _sharding(value: Any, flat: Flat) -> Outcome:
    stages = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3}
    if value not in stages:
        return Outcome(note=f"there are {', '.join(stages)}")
    return Outcome({"scorers.critic.zero_stage": stages[value]}, note="the stage of DeepSpeed ZeRO that shards as much")


_BACKEND = "training is DeepSpeed ZeRO here, whatever shards it in verl"
_ONE_ENGINE = "each rollout server is one engine on one device; more servers take more prompts at once"
_VLLM = "there is no other backend for rollouts"
_PRECISIONS = {"bfloat16": "bfloat16", "float32": "float32", "float": "float32"}
_SCHEDULES = {"constant": "constant", "cosine": "cosine"}

SMALL: dict[str, Rule] = {
    "trainer.project_name": same("first part of the job's name"),
    "trainer.experiment_name": same("second part of the job's name"),
    "trainer.n_gpus_per_node": _ranks,
    "trainer.nnodes": only((1, None), "one machine is used"),
    "trainer.total_epochs": to("trainer.total_epochs"),
    "trainer.save_freq": frequency("trainer.save_freq"),
    "trainer.test_freq": frequency("trainer.test_freq", "evaluates where data.val_files are named"),
    "trainer.default_local_dir": to("resources.runs_dir", "checkpoints lie in each run's folder below it"),
    "trainer.default_hdfs_dir": no("checkpoints stay on this machine: fetch them with `nightshift export`"),
    "data.train_files": listed("data.train_files"),
    "data.val_files": listed("data.test_files"),
    "data.prompt_key": to("data.prompt_key"),
    "data.train_batch_size": to("rollout.batch_size"),
    "data.max_prompt_length": to("data.max_prompt_length"),
    "data.max_response_length": to("rollout.max_response_length"),
    "data.chat_template": to("data.chat_template"),
    "actor_rollout.model_name_or_path": to("model.path"),
    "actor_rollout.backend": only(("vllm",), _VLLM),
    "actor_rollout.vllm_config.tensor_parallel_size": only((1, None), _ONE_ENGINE),
    "actor_rollout.vllm_config.dtype": choose("rollout.dtype", _PRECISIONS, "this precision is not offered"),
    "actor_rollout.vllm_config.max_model_len": to("rollout.max_model_len"),
    "actor_rollout.vllm_config.max_num_seqs": to("rollout.max_num_seqs"),
    "actor_rollout.vllm_config.gpu_memory_utilization": no("set rollout.kv_cache_gib, which counts in GiB"),
    "actor_rollout.learning_rate": to("trainer.learning_rate"),
    "critic.model_name_or_path": _critic("model"),
    "critic.learning_rate": _critic("learning_rate"),
    "critic.backend": same(_BACKEND),
    "critic.fsdp_config.sharding_strategy": _sharding,
    "critic.fsdp_config.mixed_precision": only((None, "no", "fp32"), "the critic computes in scorers.critic.dtype"),
    "algorithm.gamma": to("algorithm.gamma"),
    "algorithm.lam": to("algorithm.gae_lambda"),
    "algorithm.kl_penalty": _kl_number,
    "algorithm.adv_estimator": _estimator,
}

_A, _R, _F = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_OFFLOAD = only((False, None), "states are not offloaded")

FULL: dict[str, Rule] = {
    # data
    "data.train_files": listed("data.train_files"),
    "data.val_files": listed("data.test_files"),
    "data.prompt_key": to("data.prompt_key"),
    "data.reward_fn_key": only(("data_source", None), "rewards get data_source under that name"),
    "data.max_prompt_length": to("data.max_prompt_length"),
    "data.max_response_length": to("rollout.max_response_length"),
    "data.train_batch_size": to("rollout.batch_size"),
    "data.val_batch_size": same("evaluation runs on the same servers, as many prompts at once as fit"),
    "data.shuffle": to("data.shuffle"),
    "data.seed": to("trainer.seed"),
    "data.truncation": _truncation,
    "data.filter_overlong_prompts": _overlong,
    "data.filter_overlong_prompts_workers": same("prompts are measured in one process"),
    "data.return_raw_input_ids": same("token ids are always kept"),
    "data.return_raw_chat": same("rewards get the prompt in any case"),
    "data.return_full_prompt": same("rewards get the prompt in any case"),
    "data.trust_remote_code": only((False, None), "code of a model repository is not run"),
    "data.tokenizer": to("model.tokenizer"),
    "data.dataloader_num_workers": same("prompts become token ids once, before the first step"),
    "data.validation_shuffle": only((False, None), "evaluation takes its prompts in order"),
    "data.apply_chat_template_kwargs.*": no("chat templates get no further arguments"),
    "data.image_key": same("not used: prompts are text"),
    "data.video_key": same("not used: prompts are text"),
    # model
    "actor_rollout_ref.hybrid_engine": same("rollouts and training run beside each other"),
    "actor_rollout_ref.model.path": to("model.path"),
    "actor_rollout_ref.model.tokenizer_path": to("model.tokenizer"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": to("trainer.gradient_checkpointing"),
    "actor_rollout_ref.model.use_remove_padding": to("trainer.padding_free"),
    "actor_rollout_ref.model.use_shm": same("weights lie in shared memory in any case"),
    "actor_rollout_ref.model.trust_remote_code": only((False, None), "code of a model repository is not run"),
    "actor_rollout_ref.model.external_lib": only((None,), "no module is imported for a model"),
    "actor_rollout_ref.model.lora_rank": only((0, None), "adapters are not trained; the whole model is"),
    "actor_rollout_ref.model.lora_alpha": same("only matters with lora_rank"),
    "actor_rollout_ref.model.target_modules": same("only matters with lora_rank"),
    "actor_rollout_ref.model.enable_activation_offload": _OFFLOAD,
    "actor_rollout_ref.model.use_liger": only((False, None), "trainer.compile takes its place"),
    "actor_rollout_ref.model.use_fused_kernels": only((False, None), "trainer.compile takes its place"),
    "actor_rollout_ref.model.override_config.attn_implementation": to("model.attn_implementation"),
    # actor
    f"{_A}.strategy": same(_BACKEND),
    f"{_A}.ppo_mini_batch_size": _mini_batch,
    f"{_A}.ppo_micro_batch_size": _micro("trainer.micro_batch_size"),
    f"{_A}.ppo_micro_batch_size_per_gpu": _micro("trainer.micro_batch_size"),
    f"{_A}.use_dynamic_bsz": same("with it, ppo_max_token_len_per_gpu counts"),
    f"{_A}.ppo_max_token_len_per_gpu": _tokens,
    f"{_A}.grad_clip": to("trainer.max_grad_norm"),
    f"{_A}.clip_ratio": _clip,
    f"{_A}.clip_ratio_low": to("algorithm.clip_low"),
    f"{_A}.clip_ratio_high": to("algorithm.clip_high"),
    f"{_A}.clip_ratio_c": to("algorithm.dual_clip"),
    f"{_A}.policy_loss.loss_mode": choose(
        "algorithm.policy_loss", {"vanilla": "ppo_clip", "gspo": "gspo", "cispo": "cispo"}, "this loss is not offered"
    ),
    f"{_A}.entropy_coeff": to("algorithm.entropy_coef"),
    f"{_A}.use_kl_loss": same("with it, kl_loss_coef counts"),
    f"{_A}.kl_loss_coef": _kl_coef(f"{_A}.use_kl_loss", "loss"),
    f"{_A}.kl_loss_type": _kl_kind(f"{_A}.use_kl_loss"),
    f"{_A}.loss_agg_mode": choose(
        "algorithm.loss_aggregation",
        {
            "token-mean": "token_mean",
            "seq-mean-token-sum": "seq_mean_token_sum",
            "seq-mean-token-mean": "seq_mean_token_mean",
            "seq-mean-token-sum-norm": "constant_length",
        },
        "this aggregation is not offered",
    ),
    f"{_A}.ppo_epochs": only((1, None), "each batch is trained on once"),
    f"{_A}.shuffle": only((False, None), "a batch makes one update, so that its order does not matter"),
    f"{_A}.ulysses_sequence_parallel_size": only((1, None), "sequences are not split over ranks"),
    f"{_A}.use_torch_compile": to("trainer.compile"),
    f"{_A}.optim.lr": to("trainer.learning_rate"),
    f"{_A}.optim.lr_warmup_steps": frequency("trainer.warmup_steps"),
    f"{_A}.optim.lr_warmup_steps_ratio": only((0, 0.0, None), "give the number of steps: lr_warmup_steps"),
    f"{_A}.optim.warmup_style": choose("trainer.lr_schedule", _SCHEDULES, "not offered"),
    f"{_A}.optim.lr_scheduler_type": choose("trainer.lr_schedule", _SCHEDULES, "not offered"),
    f"{_A}.optim.weight_decay": to("trainer.weight_decay"),
    f"{_A}.optim.betas": lambda value, flat: Outcome({"trainer.beta1": value[0], "trainer.beta2": value[1]}),
    f"{_A}.optim.total_training_steps": same("the schedule ends with the run"),
    f"{_A}.fsdp_config.param_offload": _OFFLOAD,
    f"{_A}.fsdp_config.optimizer_offload": _OFFLOAD,
    f"{_A}.fsdp_config.*": no(_BACKEND),
    f"{_A}.checkpoint.*": same("each checkpoint holds an HF folder and the resume state"),
    # reference
    f"{_F}.strategy": same("the reference is a Ray Serve deployment"),
    f"{_F}.log_prob_micro_batch_size": _micro("scorers.reference.micro_batch_size"),
    f"{_F}.log_prob_micro_batch_size_per_gpu": _micro("scorers.reference.micro_batch_size"),
    f"{_F}.model.path": to("scorers.reference.model"),
    f"{_F}.fsdp_config.*": no("the reference is a Ray Serve deployment, and is not sharded"),
    f"{_F}.*": no("the reference is a Ray Serve deployment with a micro-batch of its own"),
    # rollout
    f"{_R}.name": only(("vllm",), _VLLM),
    f"{_R}.mode": same("servers always run beside the training"),
    f"{_R}.n": to("rollout.n"),
    f"{_R}.temperature": to("rollout.temperature"),
    f"{_R}.top_k": only((-1, 0, None), "cutting the distribution biases the ratio between trainer and sampler"),
    f"{_R}.top_p": only((1, 1.0, None), "cutting the distribution biases the ratio between trainer and sampler"),
    f"{_R}.do_sample": only((True, None), "training samples; only evaluation is greedy"),
    f"{_R}.prompt_length": same("data.max_prompt_length says it"),
    f"{_R}.response_length": to("rollout.max_response_length"),
    f"{_R}.dtype": choose("rollout.dtype", _PRECISIONS, "this precision is not offered"),
    f"{_R}.ignore_eos": to("rollout.ignore_eos"),
    f"{_R}.max_model_len": to("rollout.max_model_len"),
    f"{_R}.max_num_seqs": to("rollout.max_num_seqs"),
    f"{_R}.gpu_memory_utilization": no("set rollout.kv_cache_gib, which counts in GiB"),
    f"{_R}.tensor_model_parallel_size": only((1, None), _ONE_ENGINE),
    f"{_R}.free_cache_engine": same(
        "servers keep their memory, and generate beside the training; rollout.sleep_mode with pipeline.max_staleness 0 "
        "has them take turns"
    ),
    f"{_R}.enforce_eager": no("give it to the server: rollout.extra_args: [--enforce-eager]"),
    f"{_R}.max_num_batched_tokens": no("give it to the server: rollout.extra_args: [--max-num-batched-tokens, N]"),
    f"{_R}.enable_chunked_prefill": same("vLLM decides"),
    f"{_R}.load_format": same("weights come from the trainer"),
    f"{_R}.calculate_log_probs": same("every token carries the log-prob that it was sampled with"),
    f"{_R}.log_prob_micro_batch_size": same("log-probs come from the sampler and are not computed again"),
    f"{_R}.log_prob_micro_batch_size_per_gpu": same("log-probs come from the sampler and are not computed again"),
    f"{_R}.log_prob_use_dynamic_bsz": same("log-probs come from the sampler and are not computed again"),
    f"{_R}.log_prob_max_token_len_per_gpu": same("log-probs come from the sampler and are not computed again"),
    f"{_R}.val_kwargs.do_sample": only((False, None), "evaluation is greedy"),
    f"{_R}.val_kwargs.n": only((1, None), "evaluation draws one greedy answer"),
    f"{_R}.val_kwargs.*": same("evaluation is greedy"),
    f"{_R}.multi_turn.enable": only((False, None), "responses have one turn"),
    f"{_R}.multi_turn.*": same("only matters with multi_turn.enable"),
    f"{_R}.agent.*": no("responses have one turn, and no tools"),
    f"{_R}.engine_kwargs.*": no("give arguments to the server: rollout.extra_args"),
    # critic
    "critic.strategy": same(_BACKEND),
    "critic.model.path": _critic("model"),
    "critic.optim.lr": _critic("learning_rate"),
    "critic.optim.weight_decay": _critic("weight_decay"),
    "critic.grad_clip": _critic("max_grad_norm"),
    "critic.cliprange_value": _critic("value_clip"),
    "critic.ppo_micro_batch_size": _micro("scorers.critic.micro_batch_size"),
    "critic.ppo_micro_batch_size_per_gpu": _micro("scorers.critic.micro_batch_size"),
    "critic.ppo_epochs": only((1, None), "each batch is trained on once"),
    "critic.*": no("the critic takes the batch, the schedule and the shards that scorers.critic and trainer say"),
    # rewards
    "custom_reward_function.path": same("rewards: an adapter beside the job file calls it"),
    "custom_reward_function.name": same("rewards: an adapter beside the job file calls it"),
    "reward_model.enable": only((False, None), "a reward model is a scorer of its own: rewards with type grpc"),
    "reward_model.reward_manager": only(("naive", None), "each sample is scored by itself"),
    "reward_model.*": no("a reward model is a scorer of its own: rewards with type grpc"),
    # algorithm
    "algorithm.adv_estimator": _estimator,
    "algorithm.gamma": to("algorithm.gamma"),
    "algorithm.lam": to("algorithm.gae_lambda"),
    "algorithm.norm_adv_by_std_in_grpo": same("false makes grpo dr_grpo"),
    "algorithm.use_kl_in_reward": same("with it, kl_ctrl.kl_coef counts"),
    "algorithm.kl_penalty": _kl_kind("algorithm.use_kl_in_reward"),
    "algorithm.kl_ctrl.type": only(("fixed", None), "the coefficient stays as it is; change it while the job runs"),
    "algorithm.kl_ctrl.kl_coef": _kl_coef("algorithm.use_kl_in_reward", "reward"),
    "algorithm.kl_ctrl.*": same("only matters with an adaptive coefficient"),
    # trainer
    "trainer.project_name": same("first part of the job's name"),
    "trainer.experiment_name": same("second part of the job's name"),
    "trainer.logger": _loggers,
    "trainer.nnodes": only((1, None), "one machine is used"),
    "trainer.n_gpus_per_node": _ranks,
    "trainer.total_epochs": to("trainer.total_epochs"),
    "trainer.total_training_steps": to("trainer.total_steps"),
    "trainer.save_freq": frequency("trainer.save_freq"),
    "trainer.test_freq": frequency("trainer.test_freq"),
    "trainer.critic_warmup": to("scorers.critic.warmup_steps"),
    "trainer.val_before_train": only((True, None), "the first policy is always evaluated where there are test files"),
    "trainer.val_only": only((False, None), "a job trains"),
    "trainer.resume_mode": same("`nightshift run --resume RUN` goes on with a run"),
    "trainer.max_actor_ckpt_to_keep": to("checkpoint.keep"),
    "trainer.default_local_dir": to("resources.runs_dir", "checkpoints lie in each run's folder below it"),
    "trainer.default_hdfs_dir": only((None,), "checkpoints stay on this machine: fetch them with `nightshift export`"),
    "trainer.device": _device,
    "trainer.balance_batch": same("micro-batches hold samples of like length"),
    "trainer.log_val_generations": same("`nightshift rollouts` shows what was generated"),
}
