"""A pipeline that is driven from outside: batches come as requests, and a step is made when one asks for it."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from nightshift.data import Prompt, Tokenizer, load_prompts
from nightshift.wire import codec
from nightshift.wire.errors import BadInputError, NightshiftError
from nightshift.wire.experience import Sample
from nightshift.wire.mailbox import Mailbox
from orchestrator.runner.group import Group, start_group_span
from orchestrator.runner.ledger import GroupRecord, GroupState
from orchestrator.runner.pipeline import Pipeline

_POLL_S = 0.02
#: A driver that asks for nothing for so long is gone.
_IDLE_S = 3600.0


class SessionPipeline(Pipeline):
    """Answers the requests of a run's mailbox, one after the other; rollouts run beside the steps."""

    tokenizer: Tokenizer
    run_dir: Path

    async def run(self, resumed: list[tuple[GroupRecord, Group | None]]) -> bool:
        """Serves until it is closed or stopped; True where it was closed.

        Raises:
            NightshiftError: a role failed for good.
        """
        for record, _ in resumed:  # their driver is gone, and nobody will ask for them
            await self._books.move(record.index, GroupState.CANCELLED, reason="the session that asked for it ended")
            self._spool.remove([record.index])
        self._batches: dict[int, list[int]] = {}
        box = Mailbox(self.run_dir)
        number, asked = box.answered() + 1, time.monotonic()
        waiting: set[asyncio.Task[None]] = set()
        try:
            while not self._stop.is_set():
                if self._failure is not None:
                    raise self._failure
                data = box.request(number)
                if data is None:
                    if time.monotonic() - asked > _IDLE_S and not waiting:
                        raise BadInputError(f"nobody asked for anything for {_IDLE_S:.0f} s", role="job")
                    await asyncio.sleep(_POLL_S)
                    continue
                asked = time.monotonic()
                request = codec.unpack(data)
                if request.get("kind") == "close":
                    await self._close(waiting)
                    box.reply(number, codec.pack({"ok": True}))
                    return True
                try:
                    if request.get("kind") == "rollout":
                        indices = await self._begin_batch(number, request)
                        task = asyncio.create_task(self._answer_rollout(box, number, indices))
                        waiting.add(task)
                        task.add_done_callback(waiting.discard)
                    else:
                        box.reply(number, codec.pack(await self._serve(request)))
                except NightshiftError as error:
                    box.reply(number, codec.pack({"error": error.to_dict()}))
                    if self._failure is not None or not isinstance(error, BadInputError):
                        raise
                number += 1
            return False
        finally:
            for task in (*waiting, *self._tasks):
                task.cancel()
            await asyncio.gather(*waiting, *self._tasks, return_exceptions=True)

    async def _serve(self, request: dict[str, Any]) -> dict[str, Any]:
        match request.get("kind"):
            case "step":
                return await self._step(int(request["rollout"]))
            case "loss":
                return await self._loss(int(request["rollout"]))
            case "discard":
                await self._discard(int(request["rollout"]))
                return {"ok": True}
        raise BadInputError(f"there is no request {request.get('kind')!r}", role="job")

    # Rollouts ---------------------------------------------------------------------------------------------------------

    async def _begin_batch(self, number: int, request: dict[str, Any]) -> list[int]:
        if self.live is not None:
            await self.live.boundary(
                self._stepper.step,
                len(self._state.ready) + len(self._state.running),
                self._admission,
                self._stepper.checkpoint,
            )
        prompts = await asyncio.to_thread(self._prompts_of, number, request.get("rows"))
        first = self._books.ledger.issued
        records, spans = [], []
        for index in range(first, first + len(prompts)):
            span, trace_id = start_group_span(self._tracing, index, prompts[index - first], 0)
            records.append(GroupRecord(index, 0, 0, trace_id))
            spans.append((span, self._tracing.child("issue", span)))
        await self._books.issue(*records)
        for record, prompt, both in zip(records, prompts, spans, strict=True):
            self._launch(Group(record.index, prompt, 0, record.trace_id, self._stepper.server_step, *both))
        indices = [record.index for record in records]
        self._batches[number] = indices
        return indices

    def _prompts_of(self, number: int, rows: Any) -> list[Prompt]:
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            raise BadInputError("a batch must be a list of rows, each a map with a prompt", role="job")
        path = self.run_dir / "session" / f"batch-{number:06d}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        found = load_prompts(self._spec.data, [str(path)], self.tokenizer)
        if len(found.prompts) != len(rows):
            raise BadInputError(f"of {len(rows)} rows {len(found.prompts)} can be used: {found.summary()}", role="job")
        return found.prompts

    async def _answer_rollout(self, box: Mailbox, number: int, indices: list[int]) -> None:
        try:
            await self._wait(lambda: not any(index in self._state.running for index in indices))
        except NightshiftError as error:
            box.reply(number, codec.pack({"error": error.to_dict()}))
            return
        groups = [self._state.ready[index] for index in indices if index in self._state.ready]
        if not groups:
            causes = self._state.failures or [BadInputError("all groups were left out: their rewards are equal")]
            box.reply(number, codec.pack({"error": causes[-1].to_dict()}))
            return
        answer = {"rollout": number, "samples": [_plain(sample) for group in groups for sample in group.samples]}
        box.reply(number, codec.pack(answer | {"failed_groups": len(indices) - len(groups)}))

    # Steps ------------------------------------------------------------------------------------------------------------

    def _batch(self, batch: int) -> list[int]:
        indices = self._batches.get(batch)
        if indices is None:
            raise BadInputError(f"rollout {batch} was stepped or discarded before, or never made", role="job")
        return indices

    async def _loss(self, batch: int) -> dict[str, Any]:
        indices = self._batch(batch)
        if self.live is not None:  # a step would take up the settings that were changed, and so does its loss
            await self.live.boundary(self._stepper.step, len(indices), self._admission, self._stepper.checkpoint)
        groups = [self._state.ready[index] for index in indices if index in self._state.ready]
        return {"step": self._stepper.step, "metrics": await self._stepper.loss_of(groups)}

    async def _step(self, batch: int) -> dict[str, Any]:
        indices = self._batch(batch)
        del self._batches[batch]
        if self.live is not None:
            await self.live.boundary(self._stepper.step, len(indices), self._admission, self._stepper.checkpoint)
        ages = [age for age in self._state.ready_ages() if age.order in set(indices)]
        bound, step = self._admission.max_staleness, self._stepper.step
        if bound is not None and any(step - age.oldest_version > bound for age in ages):
            oldest = step - min(age.oldest_version for age in ages)
            for index in [age.order for age in ages]:
                await self._drop([index])
            raise BadInputError(
                f"the rollout is {oldest} steps old, and pipeline.max_staleness is {bound}", role="job",
                fix="Step a rollout before further ones, or raise max_staleness",
            )  # fmt: skip
        began = time.time()
        groups = self._state.open_with(ages)
        failures, self._state.failures = self._state.failures, []
        try:
            await self._stepper.add_part(groups, final=True, waited_since=began, failures=failures)
        finally:
            self._state.close()
        await self._stepper.settle()
        return {"step": self._stepper.step, "metrics": self._stepper.metrics}

    async def _discard(self, batch: int) -> None:
        for index in self._batches.pop(batch, []):
            task = self._group_tasks.get(index)
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if index in self._state.ready:
                group = self._state.remove(index)
            elif index in self._state.running:
                group = self._state.end(index)
            else:
                continue
            await self._books.move(index, GroupState.CANCELLED, reason="discarded")
            self._spool.remove([index])
            group.span.set_attribute("rl.dropped", "discarded")
            group.span.end()
        await self._notify()

    async def _close(self, waiting: set[asyncio.Task[None]]) -> None:
        for batch in list(self._batches):
            await self._discard(batch)
        await asyncio.gather(*waiting, return_exceptions=True)
        await self._stepper.settle()


def _plain(sample: Sample) -> dict[str, Any]:
    """A sample as its driver sees it; times in seconds."""
    return {
        "sample_id": sample.sample_id,
        "group_id": sample.group_id,
        "trace_id": sample.trace_id,
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids,
        "response": sample.response_text,
        "logprobs": sample.logprobs,
        "loss_mask": sample.loss_mask,
        "values": sample.values,
        "ref_logprobs": sample.ref_logprobs,
        "reward": sample.reward,
        "reward_parts": sample.reward_parts,
        "reward_error": sample.reward_error,
        "finish_reason": sample.finish_reason,
        "weight_versions": [span.version for span in sample.versions],
        "generate_seconds": sample.generate_seconds,
        "reward_seconds": sample.reward_seconds,
        "critic_seconds": sample.value_seconds,
    }
