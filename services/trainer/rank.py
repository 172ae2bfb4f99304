"""One rank of the trainer, without Ray: usable in a plain process and by the rank actor alike."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nightshift.config.algorithm import PREFERENCE_LOSSES
from nightshift.wire.experience import LossSpec, Sample
from nightshift.wire.scoring import SequenceInput, SequenceResult
from services.trainer.aggregate import divisor, token_weights, weighted_sum
from services.trainer.batching import Batch, Pair, pack, pad, plan, trained
from services.trainer.checkpoint import export_hf, load_engine, save_engine
from services.trainer.checks import check_loss_spec, check_samples
from services.trainer.config import RankConfig
from services.trainer.engine import Engine, init_process_group
from services.trainer.links import Links, nccl_links
from services.trainer.losses import LossInputs, kl_terms, policy_loss
from services.trainer.model_folder import DTYPES
from services.trainer.policy import can_share, load_policy, to_device, upload
from services.trainer.preference import SUMS, preference_loss, units
from services.trainer.publish import gather, publish
from services.trainer.shared_weights import SharedWeights
from services.trainer.store import Publication
from services.trainer.sums import PartSums, to_metrics

_SUMS = ("loss", "policy", "kl", "entropy", "clipped", "kl_clamped", "abs_log_ratio", *SUMS)


class TrainerRank:
    """Model, optimiser and accumulated gradient of one rank.

    Every rank of a group makes the same calls with the same arguments in the same order, and takes its own share.

    Args:
        config: model, precision and optimiser.
        rank: number of this rank.
        world: number of ranks.
        init_method: where the ranks meet, with more than one.

    Raises:
        BadInputError: the model cannot be loaded, or settings do not go together.
    """

    def __init__(self, config: RankConfig, rank: int = 0, world: int = 1, init_method: str | None = None) -> None:
        self.config = config
        self.rank = rank
        self.world = world
        self.optimizer_steps = 0
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        # On a GPU some of them take many times as long.
        torch.use_deterministic_algorithms(config.deterministic, warn_only=True)
        # It writes NaN into every new tensor, a debugging aid that costs a third of the time of a step.
        torch.utils.deterministic.fill_uninitialized_memory = False
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
        )
        init_process_group(rank, world, init_method, config.device)
        self._load()
        model_config = self.policy.model.config
        self.vocab_size = int(model_config.vocab_size)
        self.max_positions = int(getattr(model_config, "max_position_embeddings", 2**31))
        self.parameters = sum(p.numel() for p in self.policy.parameters())
        self.engine = Engine(self.policy, config, self.device)
        if config.compiles:
            self._compile()
        self._shared: SharedWeights | None = None
        self._links: Links | None = None
        self._linking = threading.Lock()
        self._seen: list[dict[str, Any]] = []

    def _load(self) -> None:
        """Reads the module that is trained, and finds out whether responses may share their prompt's row."""
        self.policy: Any = load_policy(self.config)
        self._share = not self.policy.packed and self.config.share_prompts and can_share(self.policy)

    def _compile(self) -> None:
        """Compiles what the first update would wait for a minute for, while other roles are still starting.

        Two responses go through the model and back with a gradient of zero, which is forgotten.
        """
        ids = np.arange(8, dtype=np.int32) % self.vocab_size
        logprobs, entropy = self._forward(self._batch([(ids, ids), (ids, ids[:5])]), 1.0)
        self._backward((logprobs.sum() + entropy.sum()) * 0.0, 1.0)
        self.discard()

    def accumulate(self, samples: Sequence[Sample], spec: LossSpec, loss_divisor: float = 1.0) -> PartSums:
        """Adds the gradient of a part of a batch.

        Args:
            samples: the part, whole: each rank takes its share.
            spec: the loss.
            loss_divisor: what the loss is divided by right here; 1 where :meth:`apply` divides.

        Returns:
            Sums of this rank's share, undivided.
        """
        self._seen = []
        return self._pass(samples, spec, loss_divisor)

    def evaluate(self, samples: Sequence[Sample], spec: LossSpec) -> PartSums:
        """What :meth:`accumulate` would return for these samples, without a gradient: nothing is changed."""
        with torch.no_grad():
            return self._pass(samples, spec, None)

    def _pass(self, samples: Sequence[Sample], spec: LossSpec, loss_divisor: float | None) -> PartSums:
        """This rank's share of some samples through the model, and back where the loss has a divisor."""
        kept = trained(samples)
        parcels = units(kept, spec)
        lengths = [sum(len(s.prompt_ids) + len(s.response_ids) for s in parcel) for parcel in parcels]
        mine, turns = self._pieces(lengths)
        micros = [[sample for index in micro for sample in parcels[index]] for micro in mine]
        parts = [self._micro_step(micro, spec, loss_divisor) for micro in micros]
        for _ in range(turns - len(mine)):
            # Passes hold collectives, so that a rank with fewer samples joins with a gradient of zero.
            logprobs, _ = self._forward(self._batch([(kept[0].prompt_ids, kept[0].response_ids)]), spec.temperature)
            self._backward(logprobs.sum() * 0.0, None if loss_divisor is None else 1.0)
        return self._total([sample for micro in micros for sample in micro], parts)

    def _backward(self, loss: Tensor, loss_divisor: float | None) -> None:
        """Adds the gradient of a loss; without a divisor there is none to add."""
        if loss_divisor is not None:
            self.engine.backward(loss / loss_divisor if loss_divisor != 1.0 else loss)

    def apply(self, step_divisor: float, learning_rate: float) -> dict[str, float]:
        """Divides the accumulated gradient, clips it, and makes one optimiser step.

        Returns:
            ``grad_norm`` (before the clip) and ``lr``; on CUDA also ``memory/gpu_peak_bytes``, of torch's tensors.

        Raises:
            NonFiniteGradientError: nothing was changed, and what was accumulated is gone.
        """
        norm = self.engine.step(step_divisor, learning_rate)
        self.optimizer_steps += 1
        metrics = {"grad_norm": norm, "lr": learning_rate}
        if self.device.type == "cuda":
            metrics["memory/gpu_peak_bytes"] = float(torch.cuda.max_memory_allocated(self.device))
        return metrics

    def discard(self) -> None:
        """Forgets the accumulated gradient."""
        self.engine.discard()

    def update(self, samples: Sequence[Sample], spec: LossSpec, learning_rate: float) -> dict[str, float]:
        """A whole batch in one call, for plain loops on one rank.

        Returns:
            The metrics of the step; ``stepped`` is 0 where the batch held no trained token and nothing was changed.

        Raises:
            BadInputError: the loss or a sample cannot be used.
        """
        check_loss_spec(spec)
        check_samples(samples, spec, self.vocab_size, self.max_positions)
        kept = trained(samples)
        if not kept:
            return {"stepped": 0.0, "tokens": 0.0}
        tokens = spec.total_tokens or sum(sample.trained_tokens for sample in kept)
        total = divisor(spec.aggregation, tokens, spec.total_sequences or len(kept), spec.constant_length)
        sums = self.accumulate(samples, spec, total)
        return to_metrics(sums, spec, total) | self.apply(1.0, learning_rate) | {"stepped": 1.0}

    def log_probs(self, sequences: Sequence[SequenceInput], exact: bool = False) -> list[SequenceResult]:
        """Log-probs of response tokens under the current weights, of this rank's share in order.

        Args:
            sequences: all of them: each rank takes its share.
            exact: without autocast, for a comparison with the sampler.
        """
        mine, turns = self._pieces([len(item["prompt_ids"]) + len(item["response_ids"]) for item in sequences])
        found: dict[int, Tensor] = {}
        with self._precision(exact), torch.no_grad():
            for micro in mine:
                items = [sequences[index] for index in micro]
                batch = self._batch([(item["prompt_ids"], item["response_ids"]) for item in items])
                temperatures = [
                    np.full(n, item.get("temperature", 1.0), np.float32)
                    for item, n in zip(items, batch.sizes, strict=True)
                ]
                temperature = upload(np.concatenate(temperatures), self.device)
                logprobs, _ = self.engine(temperature=temperature, **to_device(batch, self.device))
                found |= dict(zip(micro, logprobs.cpu().split(batch.sizes), strict=True))
            for _ in range(turns - len(mine)):
                self._forward(self._batch([(sequences[0]["prompt_ids"], sequences[0]["response_ids"])]), 1.0)
        return [
            {
                "id": sequences[index]["id"],
                "logprobs": found[index].numpy(),
                "token_ids": sequences[index]["response_ids"],
            }
            for index in sorted(found)
        ]

    def publish(self, store: Path) -> Publication | None:
        """Publishes the weights in the rollout precision; None on ranks other than 0.

        Args:
            store: folder of the files, of backend "safetensors".

        Raises:
            RoleError: the store cannot be written, or the device has no room.
        """
        if self.config.weight_backend != "safetensors":
            publication = self._publish_on_device()
        else:
            tensors = self._gathered(self.config.rollout_dtype)
            publication = publish(tensors, store) if self.rank == 0 else None
        if self.config.takes_turns:  # the server wakes next, into the memory that the step's activations had
            torch.cuda.empty_cache()
        return publication

    def save_state(self, folder: Path) -> None:
        """Writes this rank's part of a resume state into a folder that exists."""
        save_engine(self.engine.engine, folder, self.rank, {"optimizer_steps": self.optimizer_steps})

    def load_state(self, folder: Path) -> None:
        """Takes weights, optimiser state and random states from a resume state of as many ranks.

        Raises:
            RoleError: the folder holds none.
        """
        self.discard()
        self.optimizer_steps = int(load_engine(self.engine.engine, folder, self.rank)["optimizer_steps"])

    def export(self, folder: Path, dtype: str | None = None) -> None:
        """Writes an HF folder; every rank calls this, rank 0 writes.

        Args:
            folder: made here.
            dtype: precision of the weights; None: that of the parameters.
        """
        tensors = self._gathered(dtype or self.config.dtype)
        if self.rank == 0:
            model_path = Path(self.config.model_path)
            export_hf(self.policy, tensors, folder, model_path, Path(self.config.tokenizer_path or model_path))

    def _gathered(self, dtype: str) -> dict[str, Tensor]:
        return gather(self.policy, DTYPES[dtype], keep=self.rank == 0, partitioned=self.config.zero_stage == 3)

    def _publish_on_device(self) -> Publication | None:
        partitioned = self.config.zero_stage == 3
        if self._shared is None:
            devices = [self.device]  # from which NCCL sends
            if self.config.weight_backend == "ipc":
                devices = [torch.device("cuda", at) for at in self.config.publishes_to()]
            if self.rank:  # keeps nothing
                devices = [torch.device("meta")]
            self._shared = SharedWeights(self.policy, DTYPES[self.config.rollout_dtype], devices, partitioned)
        if self.rank == 0:
            return self._shared.publish(self.config.weight_backend)
        if partitioned:
            self._shared.gather()
        return None

    @property
    def links(self) -> Links:
        """Of rank 0, over which published weights are sent ("nccl").

        Raises:
            RoleError: NCCL cannot be loaded.
        """
        with self._linking:  # several servers may come at once
            if self._links is None:
                self._links = nccl_links(self.device, self.config.weight_host)
            return self._links

    def send_weights(self, server: str, timeout_s: float) -> None:
        """Sends what was published last to one server; see :meth:`Links.send`. May run beside all other calls."""
        self.links.send(server, self._shared.tensors() if self._shared else [], timeout_s)

    def tensors(self) -> list[dict[str, Any]]:
        """Role, name, shape, dtype and device of each tensor of the last part's first micro-batch, for debugging."""
        return self._seen

    def _see(self, **tensors: Tensor) -> None:
        """Notes what the first micro-batch of a part is made of: a few descriptions, whether asked for or not."""
        if not self._seen:
            self._seen = [
                {
                    "role": self.config.role,
                    "name": name,
                    "shape": list(tensor.shape),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "device": str(tensor.device),
                }
                for name, tensor in tensors.items()
            ]

    def peak_memory(self) -> int:
        """Highest resident memory of this process in bytes."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @contextmanager
    def _precision(self, exact: bool) -> Iterator[None]:
        autocast = self.policy.autocast
        self.policy.autocast = autocast and not exact
        try:
            yield
        finally:
            self.policy.autocast = autocast

    def _batch(self, pairs: Sequence[Pair]) -> Batch:
        return pack(pairs) if self.policy.packed else pad(pairs, self._share)

    def _forward(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        scale = torch.full((len(batch.targets),), temperature, device=self.device)
        return self.engine(temperature=scale, **to_device(batch, self.device))

    def _pieces(self, lengths: Sequence[int]) -> tuple[list[list[int]], int]:
        """This rank's micro-batches of items with these lengths, and how many the rank with the most of them has."""
        config = self.config
        pieces = plan(lengths, self.world, config.micro_batch_size, config.max_tokens, self.policy.packed)
        return pieces[self.rank], max(map(len, pieces), default=0)

    def _micro_step(self, samples: Sequence[Sample], spec: LossSpec, loss_divisor: float | None) -> tuple[int, Tensor]:
        """Adds the gradient of some samples; without a divisor only their sums are taken.

        Returns:
            Token positions that went through the model, and on the device the sums (float64, in the order of _SUMS)
            with the largest ratio after them.
        """
        batch = self._batch([(sample.prompt_ids, sample.response_ids) for sample in samples])
        masks = [sample.loss_mask for sample in samples]
        weights = self._upload(token_weights(masks, spec.aggregation))
        mask = self._upload(np.concatenate(masks)) > 0
        behaviour = self._joined(sample.logprobs for sample in samples)
        advantages = self._joined(sample.advantages for sample in samples)
        sequence = self._upload(np.repeat(np.arange(len(samples)), batch.sizes))
        logprobs, entropy = self._forward(batch, spec.temperature)
        if not spec.entropy_coef:
            entropy = entropy.detach()
        inputs = LossInputs(logprobs, behaviour, advantages, mask, None, sequence, len(samples))
        if spec.policy_loss in PREFERENCE_LOSSES:
            outputs = preference_loss(inputs, self._joined(sample.ref_logprobs for sample in samples), spec)
        else:
            outputs = policy_loss(inputs, spec)
        losses = outputs.losses
        kl = clamped = torch.zeros_like(entropy)
        if spec.kl_coef:
            reference = self._joined(sample.ref_logprobs for sample in samples)
            kl, clamped = kl_terms(logprobs, reference, spec.kl_estimator)
            losses = losses + spec.kl_coef * kl
        if spec.entropy_coef:
            losses = losses - spec.entropy_coef * entropy
        loss = weighted_sum(losses, mask, weights)
        self._see(
            old_logprobs=behaviour, advantages=advantages, mask=mask, logprobs=logprobs, entropy=entropy, kl=kl,
            losses=losses, loss=loss, parameters=next(self.policy.parameters()),
        )  # fmt: skip
        self._backward(loss, loss_divisor)
        with torch.no_grad():
            log_ratio = (logprobs - behaviour).masked_fill(~mask, 0.0)
            over_tokens = torch.stack([kl, entropy, outputs.clipped.float(), clamped.float(), log_ratio.abs()])
            sums = over_tokens.masked_fill(~mask, 0.0).double().sum(1)
            values = dict(zip(_SUMS[2:7], sums, strict=True)) | {
                "loss": loss,
                "policy": weighted_sum(outputs.losses, mask, weights),
                **outputs.sums,
            }
            peak = log_ratio.masked_fill(~mask, -torch.inf).max().double().exp()
            return batch.input_ids.size, self._row(values, peak)

    def _row(self, sums: dict[str, Tensor], peak: Tensor) -> Tensor:
        """The sums of a micro-step as one vector, in the order of _SUMS, with the largest ratio after them."""
        none = torch.zeros((), dtype=torch.float64, device=peak.device)
        return torch.stack([*(sums.get(name, none).detach().double() for name in _SUMS), peak.double()])

    def _total(self, samples: Sequence[Sample], parts: Sequence[tuple[int, Tensor]]) -> PartSums:
        """The sums of all micro-batches; here the device is waited for, once."""
        if not parts:
            return PartSums()
        table = torch.stack([sums for _, sums in parts])
        *values, peak = torch.cat([table[:, :-1].sum(0), table[:, -1:].max(0).values]).tolist()
        return PartSums(
            tokens=float(sum(sample.trained_tokens for sample in samples)),
            sequences=float(len(samples)),
            positions=float(sum(positions for positions, _ in parts)),
            max_ratio=peak,
            **dict(zip(_SUMS, values, strict=True)),
        )

    def _joined(self, arrays: Iterable[NDArray[np.generic] | None]) -> Tensor:
        """The samples' arrays one after the other, on the device."""
        return self._upload(np.concatenate([array for array in arrays if array is not None]))

    def _upload(self, values: NDArray[Any]) -> Tensor:
        return upload(values, self.device)

    def describe(self) -> dict[str, object]:
        """What the coordinator tells callers."""
        return {
            "model": self.config.model_path,
            "dtype": self.config.dtype,
            "parameters": self.parameters,
            "vocab_size": self.vocab_size,
            "max_positions": self.max_positions,
            "optimizer_steps": self.optimizer_steps,
            "zero_stage": self.config.zero_stage,
        }
