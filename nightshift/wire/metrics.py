"""Every Prometheus metric of Nightshift's own processes in one table: name, kind, unit, labels, meaning.

The exporter makes its metrics from this table, ``docs/observability.md`` holds it, dashboards and alerts are checked
against it. A metric that is not here cannot be exported. Metrics of a step keep the name that they have in
``metrics.jsonl`` (design: ``timing/step``), with ``/`` as ``_`` and the unit behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]

PREFIX = "nightshift_"
#: On every series of a runner: which run it belongs to.
RUN_LABEL = "run_id"
#: What a label that has run out of values is set to.
OTHER = "other"

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)


@dataclass(frozen=True, slots=True)
class Label:
    """A label and its bound: either the values that it may have, or how many of them one process keeps apart."""

    name: str
    meaning: str
    values: tuple[str, ...] = ()
    most: int = 32


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as it is exported; a counter ends in ``_total``.
        kind: a gauge is set, a counter adds up, a histogram counts into ``buckets``.
        help: one sentence without its full stop.
        unit: what the name says behind the quantity; "" for a number without one.
        labels: beside ``run_id``, names of LABELS.
        step: the name in a step's metrics that it is fed from; ``*`` stands for the value of its one label.
        exemplar: whether observations carry a trace id.
    """

    name: str
    kind: Kind
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    step: str = ""
    buckets: tuple[float, ...] = ()
    exemplar: bool = False


STAGES = (
    "issue",
    "generate",
    "retry",
    "rollout",
    "reward",
    "reference",
    "teacher",
    "critic",
    "keep",
    "buffer",
    "group",
    "sleep",
    "optimizer_step",
    "store_rollouts",
    "await_push",
    "publish",
    "push_weights",
    "checkpoint",
)
"""Names of the spans that are stages; what each covers stands in docs/observability.md."""

LABELS = {
    label.name: label
    for label in (
        Label("stage", "stage of a group or of a step, by the name of its span", STAGES),
        Label("outcome", "how it ended", ("ok", "error")),
        Label(
            "state",
            "state of a prompt group in the ledger, of a server, or of the job",
            (
                *("issued", "in_flight", "trained", "dropped_stale", "dropped_filtered", "failed", "cancelled"),
                *("healthy", "suspect", "stale", "asleep", "dead", "restarting", "retired"),
                *("starting", "running", "succeeded", "interrupted"),
            ),
        ),
        Label("server", "name of a rollout server", most=256),
        Label(
            "role",
            "who does it",
            (
                *("orchestrator", "rollout", "reward", "reference", "teacher", "critic", "trainer"),
                *("agent", "job", "evaluation"),
            ),
        ),
        Label(
            "kind",
            "why an answer was refused",
            (
                "form",
                "choices",
                "request_id",
                "finish_reason",
                "version",
                "versions",
                "token_ids",
                "logprobs",
                "probe",
            ),
        ),
        Label("part", "a part that the reward function returned", most=32),
        Label("filesystem", "what lies there", ("run", "weights")),
        Label("name", "name in the step's metrics", most=64),
    )
}


def _gauge(name: str, step: str, help_: str, unit: str = "", labels: tuple[str, ...] = ()) -> Metric:
    return Metric(PREFIX + name, "gauge", help_, unit, labels, step)


def _counter(name: str, step: str, help_: str, unit: str = "", labels: tuple[str, ...] = ()) -> Metric:
    return Metric(PREFIX + name, "counter", help_, unit, labels, step)


_TIMES = {
    "timing/gen": "time in which samples of the batch were drawn",
    "timing/reward": "time in which the batch was rewarded",
    "timing/ref": "time in which the reference scored the batch",
    "timing/values": "time in which the critic scored the batch",
    "timing/teacher": "time in which the teacher scored the batch",
    "timing/adv": "time for the advantages",
    "timing/update_actor": "time of the policy's update in the trainer",
    "timing/update_critic": "time of the critic's update in the trainer",
    "timing/publish": "time in which the trainer published the weights",
    "timing/sync": "longest pause of a server for the new weights",
    "timing/push": "time from the published weights to their proof on all servers",
    "timing/sleep": "time until the servers slept before the update (rollout.sleep_mode)",
    "timing/wake": "time in which a server was woken for the new weights, a part of its pause",
    "timing/wait": "time that the trainer waited for the batch",
    "timing/step": "time from one finished step to the next",
}
_SPREADS = {
    "response_length": ("tokens", "response length of the batch"),
    "staleness": ("versions", "policy versions between a group's oldest token and the update"),
}

#: Fed from the metrics of a step or of an evaluation.
STEP_METRICS: tuple[Metric, ...] = (
    *(
        _gauge(f"{name.replace('/', '_')}_seconds", name, f"Last step: {text}", "seconds")
        for name, text in _TIMES.items()
    ),
    *(
        _gauge(f"{name}_{part}_{unit}", f"{name}/{part}", f"Last step: {part} {text}", unit)
        for name, (unit, text) in _SPREADS.items()
        for part in ("mean", "min", "max")
    ),
    _gauge(
        "response_length_truncated_ratio",
        "response_length/truncated_share",
        "Last step: share of responses that were cut at the limit",
        "ratio",
    ),
    _gauge("reward_mean", "reward/mean", "Last step: mean reward of the scored samples"),
    _gauge("reward_std", "reward/std", "Last step: standard deviation of the rewards"),
    _gauge("reward_part_mean", "reward/*/mean", "Last step: mean of one part of the reward", labels=("part",)),
    _gauge("loss_actor", "loss/actor", "Last step: loss of the policy"),
    _gauge("loss_policy", "loss/policy", "Last step: the policy-gradient term of the loss"),
    _gauge("loss_critic", "loss/critic", "Last step: loss of the critic"),
    _gauge("preference_chosen_reward", "preference/chosen_reward", "Last step: implicit reward of the chosen answers"),
    _gauge("preference_rejected_reward", "preference/rejected_reward", "Last step: that of the rejected ones"),
    _gauge("preference_margin", "preference/margin", "Last step: their difference"),
    _gauge("preference_accuracy_ratio", "preference/accuracy", "Last step: share of pairs in the right order", "ratio"),
    _gauge("critic_value_mean", "critic/value_mean", "Last step: mean value that the critic gave"),
    _gauge("critic_return_mean", "critic/return_mean", "Last step: mean return that it should have given"),
    _gauge("critic_explained_variance_ratio", "critic/explained_variance", "Last step: how well it knew them", "ratio"),
    _gauge("critic_grad_norm", "critic/grad_norm", "Last step: norm of its gradient before clipping"),
    _gauge("critic_lr", "critic/lr", "Last step: its learning rate"),
    _gauge("memory_critic_peak_bytes", "memory/critic_peak_bytes", "Last step: peak memory of its rank", "bytes"),
    _gauge("critic_clip_fraction_ratio", "critic/clip_fraction", "Last step: share of its values clipped", "ratio"),
    _gauge("kl_nats", "kl", "Last step: KL divergence from the reference per token", "nats"),
    _gauge("kl_penalty_nats", "kl_penalty", "Last step: KL penalty in the reward per token", "nats"),
    _gauge("entropy_nats", "entropy", "Last step: entropy of the policy per token", "nats"),
    _gauge("clip_fraction_ratio", "clip_fraction", "Last step: share of tokens whose ratio was clipped", "ratio"),
    _gauge("grad_norm", "grad_norm", "Last step: norm of the gradient before clipping"),
    _gauge("lr", "lr", "Last step: learning rate"),
    _gauge("ratio_max", "ratio/max", "Last step: largest importance ratio of a token"),
    _gauge(
        "log_ratio_abs_mean_nats",
        "log_ratio/abs_mean",
        "Last step: mean |log-prob by the trainer - log-prob by the sampler| per token",
        "nats",
    ),
    _gauge(
        "bubble_trainer_ratio", "bubble/trainer", "Last step: share of its time in which the trainer idled", "ratio"
    ),
    _gauge("bubble_rollout_ratio", "bubble/rollout", "Last step: share of its time without generation", "ratio"),
    _gauge(
        "advantage_zero_spread_ratio",
        "advantage/zero_spread_share",
        "Last step: share of groups whose rewards are all alike",
        "ratio",
    ),
    _gauge(
        "throughput_samples_per_second", "samples_per_second", "Last step: samples trained per second", "per_second"
    ),
    _gauge(
        "throughput_response_tokens_per_second",
        "response_tokens_per_second",
        "Last step: response tokens trained per second",
        "per_second",
    ),
    _gauge("sync_changed_ratio", "sync/changed_fraction", "Last step: share of weights that changed", "ratio"),
    _gauge("memory_trainer_peak_bytes", "memory/trainer_peak_bytes", "Last step: peak memory of a rank", "bytes"),
    _gauge("memory_gpu_peak_bytes", "memory/gpu_peak_bytes", "Last step: peak memory of a rank's GPU", "bytes"),
    _gauge(
        "refill_kv_usage_ratio", "refill/kv_usage", "Last step: mean share of the servers' KV cache in use", "ratio"
    ),
    _gauge("refill_running_requests", "refill/running", "Last step: requests that the servers computed", "requests"),
    _gauge("refill_waiting_requests", "refill/waiting", "Last step: requests that waited in the servers", "requests"),
    _gauge("refill_limit_groups", "refill/limit_groups", "Last step: groups that the servers were let have", "groups"),
    _counter("refill_preemptions_total", "refill/preemptions", "Requests that servers put back for want of memory"),
    _gauge("rollout_servers", "rollout/servers", "Last step: servers known"),
    _gauge("rollout_usable_servers", "rollout/servers_usable", "Last step: servers in use", "servers"),
    _gauge("eval_margin", "eval/margin", "Last evaluation: mean margin of held-out pairs"),
    _gauge("eval_score", "eval/score", "Last evaluation: mean score of the held-out prompts"),
    _gauge("eval_scored_prompts", "eval/scored", "Last evaluation: prompts that were scored", "prompts"),
    _gauge("eval_prompts", "eval/prompts", "Last evaluation: prompts asked", "prompts"),
    _gauge("eval_response_length_tokens", "eval/response_length", "Last evaluation: mean response length", "tokens"),
    _gauge("eval_seconds", "eval/seconds", "Last evaluation: time it took", "seconds"),
    _counter("trained_samples_total", "samples", "Samples of all steps"),
    _counter("trained_sequences_total", "sequences", "Samples with at least one trained token"),
    _counter("trained_tokens_total", "tokens", "Tokens that a loss was computed on"),
    _counter("trained_positions_total", "positions", "Positions that went through the trainer, padding included"),
    _counter("reward_valid_total", "reward/valid", "Samples that were scored"),
    _counter("reward_unscored_total", "reward/unscored", "Samples whose reward failed"),
    _counter("rollout_failed_samples_total", "rollout/failed_samples", "Samples that could not be had"),
    _counter("rollout_failed_groups_total", "rollout/failed_groups", "Prompt groups that failed as a whole"),
    _counter("rollout_filtered_groups_total", "rollout/filtered_groups", "Prompt groups that a filter left out"),
    _counter("stale_groups_total", "staleness/dropped_groups", "Prompt groups dropped for their age"),
    _gauge(
        "stale_response_length_mean_tokens",
        "staleness/dropped_length/mean",
        "Last step: mean response length of what was dropped for its age",
        "tokens",
    ),
    _gauge("update_parts", "update/parts", "Last step: parts in which its batch reached the trainer"),
    _counter("update_attempts_total", "update/attempts", "Attempts at updates, the first ones included"),
    _counter("rollout_kept_tokens_total", "rollout/kept_tokens", "Tokens kept of responses that broke off"),
    _counter("rollout_rejected_total", "rollout/rejected/*", "Answers of servers that were refused", labels=("kind",)),
    _counter("advantage_single_groups_total", "advantage/single_groups", "Groups with a single scored sample"),
    _counter("advantage_empty_samples_total", "advantage/empty_samples", "Samples without a trained token"),
    _counter("advantage_clamped_tokens_total", "advantage/clamped_tokens", "Tokens whose importance weight was cut"),
    _counter("kl_clamped_tokens_total", "kl/clamped", "Tokens whose KL estimate was cut"),
    _counter("update_skipped_total", "update/skipped", "Steps that had nothing to learn from"),
    _counter("sync_bytes_total", "sync/bytes", "Bytes of published weights", "bytes"),
)

#: Anything else in a step's metrics: of a custom algorithm or trainer.
UNLISTED = Metric(
    PREFIX + "unlisted", "gauge", "Last step: a metric that this table does not know", labels=("name",), step="*"
)

#: Fed from events and spans as they happen.
EVENT_METRICS: tuple[Metric, ...] = (
    Metric(
        PREFIX + "stage_seconds",
        "histogram",
        "Time of each stage, with the trace as exemplar",
        "seconds",
        ("stage", "outcome"),
        buckets=_SECONDS,
        exemplar=True,
    ),
    Metric(
        PREFIX + "response_tokens",
        "histogram",
        "Length of each response",
        "tokens",
        buckets=_TOKENS,
        exemplar=True,
    ),
    Metric(
        PREFIX + "step_seconds",
        "histogram",
        "Time from one finished step to the next, with the job's trace as exemplar",
        "seconds",
        buckets=_SECONDS,
        exemplar=True,
    ),
    Metric(PREFIX + "steps_total", "counter", "Steps finished since the start of this process"),
    Metric(PREFIX + "warnings_total", "counter", "Warnings of the run", labels=("role",)),
    Metric(PREFIX + "role_suspect_total", "counter", "Times that a role was found away or wrong", labels=("role",)),
    Metric(PREFIX + "job_state", "gauge", "1 for the state that the job is in", labels=("state",)),
)

#: Read from the run's state at each scrape.
STATE_METRICS: tuple[Metric, ...] = (
    Metric(PREFIX + "ledger_groups", "gauge", "Prompt groups by state", "groups", ("state",)),
    Metric(
        PREFIX + "ledger_imbalance_groups",
        "gauge",
        "Groups issued minus the sum of all states: anything but 0 is a fault",
        "groups",
    ),
    Metric(PREFIX + "running_groups", "gauge", "Prompt groups being generated or scored", "groups"),
    Metric(PREFIX + "ready_groups", "gauge", "Scored groups that wait for their step", "groups"),
    Metric(PREFIX + "batch_groups", "gauge", "Prompt groups that make a step", "groups"),
    Metric(PREFIX + "admission_headroom_groups", "gauge", "Groups that the staleness bound lets start now", "groups"),
    Metric(PREFIX + "buffer_bytes", "gauge", "Experience that waits for its step", "bytes"),
    Metric(PREFIX + "buffer_limit_bytes", "gauge", "What the buffer may hold (pipeline.buffer_mib)", "bytes"),
    Metric(
        PREFIX + "staleness_bound_versions",
        "gauge",
        "pipeline.max_staleness; -1 for none",
        "versions",
    ),
    Metric(PREFIX + "trainer_version", "gauge", "Step of the trainer's weights"),
    Metric(PREFIX + "fleet_version", "gauge", "Step of the weights that all usable servers hold"),
    Metric(PREFIX + "total_steps", "gauge", "Steps that the job will make"),
    Metric(PREFIX + "server_requests", "gauge", "Requests in flight on a server", "requests", ("server",)),
    Metric(PREFIX + "server_state", "gauge", "1 for the state that a server is in", labels=("server", "state")),
    Metric(
        PREFIX + "server_lag_versions",
        "gauge",
        "Versions between the published weights and those that the server was last proved to hold; "
        "-1 where it was never proved",
        "versions",
        ("server",),
    ),
    Metric(PREFIX + "calls_in_flight", "gauge", "Calls of scorers in progress", labels=("role",)),
    Metric(
        PREFIX + "busy_seconds_total",
        "counter",
        "Time in which a role had work: the trainer a step, the servers samples to draw",
        "seconds",
        ("role",),
    ),
    Metric(PREFIX + "disk_free_bytes", "gauge", "Free room of a file system", "bytes", ("filesystem",)),
    Metric(PREFIX + "disk_size_bytes", "gauge", "Size of a file system", "bytes", ("filesystem",)),
)

METRICS: tuple[Metric, ...] = (*STEP_METRICS, UNLISTED, *EVENT_METRICS, *STATE_METRICS)
BY_NAME = {metric.name: metric for metric in METRICS}
_EXACT = {metric.step: metric for metric in STEP_METRICS if "*" not in metric.step}
_PATTERNS = [(metric.step.split("*"), metric) for metric in STEP_METRICS if "*" in metric.step]


def step_metric(name: str) -> tuple[Metric, dict[str, str]]:
    """The metric that a name of a step's metrics feeds, and its labels; UNLISTED where the table has none."""
    if (exact := _EXACT.get(name)) is not None:
        return exact, {}
    for (head, tail), metric in _PATTERNS:
        inner = name[len(head) : len(name) - len(tail)]
        if inner and name.startswith(head) and name.endswith(tail):
            return metric, {metric.labels[0]: inner}
    return UNLISTED, {UNLISTED.labels[0]: name}


class LabelBound:
    """Keeps the number of series bounded: what is not among a label's values, or comes too late, becomes ``other``."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], set[str]] = {}

    def bound(self, metric: Metric, labels: dict[str, str]) -> dict[str, str]:
        """The labels to export for these.

        Raises:
            ValueError: they are not the labels of the metric.
        """
        if tuple(sorted(labels)) != tuple(sorted(metric.labels)):
            raise ValueError(f"{metric.name} has the labels {metric.labels}, not {tuple(labels)}")
        return {name: self._value(metric.name, LABELS[name], value) for name, value in labels.items()}

    def _value(self, metric: str, label: Label, value: str) -> str:
        if label.values:
            return value if value in label.values else OTHER
        seen = self._seen.setdefault((metric, label.name), set())
        if value not in seen and len(seen) >= label.most:
            return OTHER
        seen.add(value)
        return value


def table() -> str:
    """The metrics as a Markdown table, for the documentation."""
    lines = ["| metric | kind | labels | in `metrics.jsonl` | meaning |", "| --- | --- | --- | --- | --- |"]
    for metric in METRICS:
        labels = ", ".join(f"`{name}`" for name in metric.labels)
        step = f"`{metric.step}`" if metric.step else ""
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {step} | {metric.help} |")
    return "\n".join(lines)


def label_table() -> str:
    """The labels with their bounds as a Markdown table."""
    lines = ["| label | values | meaning |", "| --- | --- | --- |"]
    lines.append(f"| `{RUN_LABEL}` | one for each process | the run; on every series of a runner |")
    for label in LABELS.values():
        values = ", ".join(f"`{value}`" for value in label.values) or f"at most {label.most}, then `{OTHER}`"
        lines.append(f"| `{label.name}` | {values} | {label.meaning} |")
    return "\n".join(lines)
