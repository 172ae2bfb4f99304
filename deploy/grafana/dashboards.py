"""The dashboards: which questions they answer, and with which queries."""

from __future__ import annotations

from deploy.grafana.panels import Board, Row, curve, number, stage_times

_SPREAD = (
    ("nightshift_staleness_mean_versions{%}", "mean"),
    ("nightshift_staleness_max_versions{%}", "oldest"),
    ("nightshift_staleness_bound_versions{%}", "bound"),
)
_STALENESS = curve(
    "Age of the samples",
    *_SPREAD,
    note="In policy versions at the update. At the bound with idle servers, it sets the pace.",
)
_BUBBLES = curve(
    "Idle share of a step",
    ("nightshift_bubble_trainer_ratio{%}", "trainer"),
    ("nightshift_bubble_rollout_ratio{%}", "rollout"),
    unit="percentunit",
    note="What is near 0 sets the pace.",
    most=1.0,
)
_BUSY = curve(
    "Busy share over five minutes",
    ("nightshift:busy:ratio_rate5m{%}", "{{role}} {{run_id}}"),
    unit="percentunit",
    most=1.0,
)
_REWARD = curve("Mean reward", ("nightshift_reward_mean{%}", "{{run_id}}"))
_WARNINGS = curve("Warnings", ("sum by (role) (nightshift_warnings_total{%})", "{{role}}"))
_IMBALANCE = curve(
    "Groups unaccounted for", ("nightshift_ledger_imbalance_groups{%}", "{{run_id}}"), note="Anything but 0 is a fault."
)

OVERVIEW = Board(
    "nightshift-overview",
    "Nightshift: overview",
    "All runs at once: is each learning, how fast, and does anything need a person.",
    (
        Row(
            "Now",
            (
                number("Jobs running", "sum(nightshift:job_running:bool{%})"),
                number("Servers in use", "sum(nightshift:servers_usable:count{%})"),
                number("Tokens trained per second", "sum(nightshift:trained_tokens:rate5m{%})"),
                number("Alerts firing", 'count(ALERTS{alertname=~"Nightshift.*", alertstate="firing"}) or vector(0)'),
            ),
        ),
        Row(
            "Learning",
            (
                _REWARD,
                curve("Held-out score", ("nightshift_eval_score{%}", "{{run_id}}")),
                curve("KL from the reference, nats per token", ("nightshift_kl_nats{%}", "{{run_id}}")),
            ),
        ),
        Row(
            "Pace",
            (
                curve("Step time", ("nightshift_timing_step_seconds{%}", "{{run_id}}"), unit="s"),
                curve("Samples trained per second", ("nightshift:trained_samples:rate5m{%}", "{{run_id}}")),
                _BUSY,
                curve(
                    "Time of the stages, 95 % are faster",
                    ("nightshift:stage_seconds:p95_rate5m{%}", "{{stage}}"),
                    unit="s",
                ),
                curve(
                    "Progress",
                    ("nightshift_trainer_version{%} / nightshift_total_steps{%}", "{{run_id}}"),
                    unit="percentunit",
                    most=1.0,
                ),
                _IMBALANCE,
                _WARNINGS,
            ),
        ),
    ),
)

JOB = Board(
    "nightshift-job",
    "Nightshift: one job",
    "One run's learning: reward, policy, responses, what became of its prompt groups.",
    (
        Row(
            "Reward",
            (
                curve(
                    "Reward",
                    ("nightshift_reward_mean{%}", "mean"),
                    ("nightshift_reward_std{%}", "standard deviation"),
                    ("nightshift_eval_score{%}", "held-out score"),
                ),
                curve("Parts of the reward", ("nightshift_reward_part_mean{%}", "{{part}}")),
                curve(
                    "Groups without a spread",
                    ("nightshift_advantage_zero_spread_ratio{%}", "share"),
                    unit="percentunit",
                    note="All samples of such a group are rewarded alike: nothing is learnt from it.",
                    most=1.0,
                ),
            ),
        ),
        Row(
            "Policy",
            (
                curve("KL from the reference, nats per token", ("nightshift_kl_nats{%}", "KL")),
                curve("Entropy, nats per token", ("nightshift_entropy_nats{%}", "entropy")),
                curve("Loss", ("nightshift_loss_actor{%}", "actor")),
                curve("Gradient norm", ("nightshift_grad_norm{%}", "before clipping")),
                curve("Clipped tokens", ("nightshift_clip_fraction_ratio{%}", "share"), unit="percentunit"),
                curve("Learning rate", ("nightshift_lr{%}", "rate")),
            ),
        ),
        Row(
            "Responses",
            (
                curve(
                    "Response length, tokens",
                    ("nightshift_response_length_mean_tokens{%}", "mean"),
                    ("nightshift_response_length_max_tokens{%}", "longest"),
                ),
                curve(
                    "Cut at the limit", ("nightshift_response_length_truncated_ratio{%}", "share"), unit="percentunit"
                ),
                _STALENESS,
            ),
        ),
        Row(
            "Books",
            (
                curve("Prompt groups", ("nightshift_ledger_groups{%}", "{{state}}")),
                curve(
                    "Samples without a reward",
                    ("nightshift:reward_errors:ratio_rate15m{%}", "share over a quarter of an hour"),
                    unit="percentunit",
                ),
                _WARNINGS,
            ),
        ),
    ),
)

PIPELINE = Board(
    "nightshift-pipeline",
    "Nightshift: pipeline and bubbles",
    "What a step's time consists of, who waits for whom, and how full the queues are.",
    (
        Row(
            "A step",
            (
                curve(
                    "Where a step's time goes",
                    *(
                        (f"nightshift_timing_{name}_seconds{{%}}", text)
                        for name, text in (
                            ("gen", "generation"),
                            ("reward", "reward"),
                            ("ref", "reference"),
                            ("wait", "trainer waits"),
                            ("update_actor", "update"),
                            ("publish", "publication"),
                            ("push", "push to the servers"),
                            ("step", "whole step"),
                        )
                    ),
                    unit="s",
                    note="Generation and scoring overlap the update: the parts are no sum.",
                ),
                _BUBBLES,
                _BUSY,
                curve(
                    "Step time, 95 % are faster",
                    (
                        "histogram_quantile(0.95, sum by (run_id, le) "
                        "(rate(nightshift_step_seconds_bucket{%}[$__rate_interval])))",
                        "{{run_id}}",
                    ),
                    unit="s",
                ),
            ),
        ),
        Row(
            "Stages",
            (
                stage_times("Generation of a sample", "generate"),
                stage_times("Scoring of a group", "reward", "reference"),
                stage_times(
                    "A group's life and its wait",
                    "group",
                    "buffer",
                    note="From its issue to its step; buffer is the wait.",
                ),
                stage_times("The trainer's stages", "optimizer_step", "publish", "push_weights"),
            ),
        ),
        Row(
            "Queues",
            (
                curve(
                    "Prompt groups in flight",
                    ("nightshift_running_groups{%}", "generated or scored"),
                    ("nightshift_ready_groups{%}", "ready"),
                    ("nightshift_batch_groups{%}", "a step takes"),
                    ("nightshift_admission_headroom_groups{%}", "may start"),
                ),
                curve(
                    "Experience that waits",
                    ("nightshift_buffer_bytes{%}", "held"),
                    ("nightshift_buffer_limit_bytes{%}", "limit"),
                    unit="bytes",
                ),
                _STALENESS,
            ),
        ),
    ),
)

FLEET = Board(
    "nightshift-fleet",
    "Nightshift: rollout fleet",
    "The vLLM servers: which are in use, with which weights, how full, and what they refuse.",
    (
        Row(
            "Servers",
            (
                curve("State", ("nightshift_server_state{%} == 1", "{{server}} {{state}}")),
                curve("Requests in flight", ("nightshift_server_requests{%}", "{{server}}")),
                curve("Versions behind", ("nightshift_server_lag_versions{%}", "{{server}}")),
                curve("Answer to a scrape", ('up{job="nightshift-rollout", %}', "{{instance}}")),
            ),
        ),
        Row(
            "Responses",
            (
                stage_times("Time of a response", "generate", "retry"),
                curve(
                    "Length of a response, tokens",
                    (
                        "histogram_quantile(0.5, sum by (run_id, le) "
                        "(rate(nightshift_response_tokens_bucket{%}[$__rate_interval])))",
                        "median",
                    ),
                    (
                        "histogram_quantile(0.95, sum by (run_id, le) "
                        "(rate(nightshift_response_tokens_bucket{%}[$__rate_interval])))",
                        "95 %",
                    ),
                ),
                curve(
                    "What went wrong, since the start",
                    ("sum by (kind) (nightshift_rollout_rejected_total{%})", "refused: {{kind}}"),
                    ("nightshift_rollout_failed_samples_total{%}", "samples that could not be had"),
                    ("nightshift_rollout_failed_groups_total{%}", "groups that failed"),
                    ("nightshift_stale_groups_total{%}", "groups dropped for their age"),
                ),
                curve(
                    "Tokens kept of broken responses", ("nightshift_rollout_kept_tokens_total{%}", "since the start")
                ),
            ),
        ),
        Row(
            "Weights",
            (
                curve(
                    "New weights",
                    ("nightshift_timing_sync_seconds{%}", "longest pause of a server"),
                    ("nightshift_timing_sleep_seconds{%}", "until the servers sleep"),
                    ("nightshift_timing_wake_seconds{%}", "until they are awake"),
                    ("nightshift_timing_push_seconds{%}", "until all are proved"),
                    unit="s",
                ),
                curve(
                    "Weights that changed", ("nightshift_sync_changed_ratio{%}", "share"), unit="percentunit", most=1.0
                ),
                curve(
                    "Versions",
                    ("nightshift_trainer_version{%}", "of the trainer"),
                    ("nightshift_fleet_version{%}", "of the servers"),
                ),
            ),
        ),
        Row(
            "vLLM's own",
            (
                curve(
                    "Requests in the engine",
                    ("vllm:num_requests_running{%}", "running"),
                    ("vllm:num_requests_waiting{%}", "waiting"),
                ),
                curve("KV cache in use", ("vllm:kv_cache_usage_perc{%}", "{{instance}}"), unit="percentunit", most=1.0),
                curve(
                    "Tokens per second",
                    ("rate(vllm:generation_tokens_total{%}[$__rate_interval])", "generated"),
                    ("rate(vllm:prompt_tokens_total{%}[$__rate_interval])", "of prompts"),
                ),
                curve("Preemptions", ("vllm:num_preemptions_total{%}", "{{instance}}")),
            ),
        ),
    ),
)

SCORERS = Board(
    "nightshift-scorers",
    "Nightshift: scorers",
    "Rewards and reference: how long they take, what fails, how busy their replicas are.",
    (
        Row(
            "Calls",
            (
                stage_times("Time of a call", "reward", "reference"),
                curve("Calls in flight", ("nightshift_calls_in_flight{%}", "{{role}}")),
                curve(
                    "Time of a batch",
                    ("nightshift_timing_reward_seconds{%}", "reward"),
                    ("nightshift_timing_ref_seconds{%}", "reference"),
                    unit="s",
                ),
                curve(
                    "Calls per second",
                    (
                        'sum by (stage, outcome) (rate(nightshift_stage_seconds_count{%, stage=~"reward|reference"}'
                        "[$__rate_interval]))",
                        "{{stage}} {{outcome}}",
                    ),
                ),
            ),
        ),
        Row(
            "Rewards",
            (
                curve(
                    "Samples, since the start",
                    ("nightshift_reward_valid_total{%}", "scored"),
                    ("nightshift_reward_unscored_total{%}", "unscored"),
                ),
                curve(
                    "Samples without a reward",
                    ("nightshift:reward_errors:ratio_rate15m{%}", "share over a quarter of an hour"),
                    unit="percentunit",
                ),
                curve("Parts of the reward", ("nightshift_reward_part_mean{%}", "{{part}}")),
            ),
        ),
        Row(
            "Ray Serve's own",
            (
                curve(
                    "Requests per second",
                    (
                        "sum by (deployment) (rate(ray_serve_deployment_request_counter_total{%}[$__rate_interval]))",
                        "{{deployment}}",
                    ),
                ),
                curve(
                    "Requests in the replicas",
                    ("sum by (deployment) (ray_serve_replica_processing_queries{%})", "{{deployment}}"),
                ),
                curve(
                    "Replicas in health",
                    ("sum by (deployment) (ray_serve_deployment_replica_healthy{%})", "{{deployment}}"),
                ),
            ),
        ),
    ),
)

TRAINER = Board(
    "nightshift-trainer",
    "Nightshift: trainer",
    "The updates: time, throughput, numerical health and memory.",
    (
        Row(
            "Time",
            (
                curve(
                    "A step in the trainer",
                    ("nightshift_timing_update_actor_seconds{%}", "update"),
                    ("nightshift_timing_publish_seconds{%}", "publication"),
                    ("nightshift_timing_wait_seconds{%}", "wait for samples"),
                    ("nightshift_timing_adv_seconds{%}", "advantages"),
                    unit="s",
                ),
                stage_times("Stages", "optimizer_step", "publish", "checkpoint"),
                curve("Tokens trained per second", ("nightshift:trained_tokens:rate5m{%}", "{{run_id}}")),
                curve(
                    "Positions that are trained tokens",
                    (
                        "rate(nightshift_trained_tokens_total{%}[$__rate_interval])"
                        " / rate(nightshift_trained_positions_total{%}[$__rate_interval])",
                        "share",
                    ),
                    unit="percentunit",
                    note="The rest are prompts and padding.",
                    most=1.0,
                ),
            ),
        ),
        Row(
            "Numbers",
            (
                curve("Gradient norm", ("nightshift_grad_norm{%}", "before clipping")),
                curve(
                    "Trainer against sampler, nats per token",
                    ("nightshift_log_ratio_abs_mean_nats{%}", "mean |log ratio|"),
                    note="Age of the samples and differences in precision; its growth is drift.",
                ),
                curve("Largest importance ratio", ("nightshift_ratio_max{%}", "of a token")),
                curve("Steps without anything to learn", ("nightshift_update_skipped_total{%}", "since the start")),
            ),
        ),
        Row(
            "Memory and weights",
            (
                curve("Peak memory of a rank", ("nightshift_memory_trainer_peak_bytes{%}", "{{run_id}}"), unit="bytes"),
                curve("Weights published", ("nightshift_sync_bytes_total{%}", "since the start"), unit="bytes"),
                curve("Learning rate", ("nightshift_lr{%}", "rate")),
            ),
        ),
    ),
)

HEALTH = Board(
    "nightshift-health",
    "Nightshift: service health",
    "The processes and machines: what answers, what is full, what was warned of.",
    (
        Row(
            "Processes",
            (
                curve("Answer to a scrape", ('up{job=~"nightshift.*"}', "{{job}} {{instance}}")),
                curve("State of the jobs", ("nightshift_job_state{%} == 1", "{{run_id}} {{state}}")),
                curve(
                    "Memory",
                    ('process_resident_memory_bytes{job=~"nightshift.*", %}', "{{job}}"),
                    unit="bytes",
                ),
                curve(
                    "CPU",
                    ('rate(process_cpu_seconds_total{job=~"nightshift.*", %}[$__rate_interval])', "{{job}}"),
                    note="Cores in use.",
                ),
            ),
        ),
        Row(
            "Faults",
            (
                _IMBALANCE,
                _WARNINGS,
                curve("Roles found away or wrong", ("sum by (role) (nightshift_role_suspect_total{%})", "{{role}}")),
                curve(
                    "Failed stages, since the start",
                    ('sum by (stage) (nightshift_stage_seconds_count{%, outcome="error"})', "{{stage}}"),
                ),
            ),
        ),
        Row(
            "Machines",
            (
                curve(
                    "Free room",
                    ("nightshift_disk_free_bytes{%} / nightshift_disk_size_bytes{%}", "{{filesystem}}"),
                    unit="percentunit",
                    most=1.0,
                ),
                curve("Memory in use (Ray)", ("ray_node_mem_used{%}", "{{instance}}"), unit="bytes"),
                curve("CPU in use (Ray), %", ("ray_node_cpu_utilization{%}", "{{instance}}")),
            ),
        ),
    ),
)

BOARDS = (OVERVIEW, JOB, PIPELINE, FLEET, SCORERS, TRAINER, HEALTH)
