"""The audit: histories of any kind balance, and each thing that is planted in one is found and named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightshift.analysis.audit import audit
from nightshift.analysis.findings import Audit, summary
from nightshift.wire.errors import BadInputError
from nightshift.wire.experience import VersionSpan
from nightshift.wire.request_log import hash_ids, hashed
from tests.fixtures.history import RUN, History

histories = st.builds(
    History,
    st.builds(Random, st.integers(0, 2**32)),
    steps=st.integers(1, 8),
    size=st.integers(1, 7),
    n=st.integers(1, 3),
    batch=st.integers(1, 3),
    bound=st.integers(0, 3),
    trouble=st.sampled_from([0.0, 0.1, 0.3, 0.5]),
)


def words(found: Audit) -> list[str]:
    return [f"{one.kind} {one.subject}: {one.message}" for one in found.findings]


@given(histories)
def test_whatever_happens_the_books_balance(history: History) -> None:
    found = audit(history.evidence())
    assert words(found) == []
    assert found.balanced
    accounts = dict(found.accounts)
    assert accounts.pop("issued") == sum(accounts.values()) == history.issued
    assert accounts["trained"] == history.step * history.batch == found.groups
    assert found.oldest <= history.bound


# What is planted, and who must be named ---------------------------------------------------------------------------

Plant = Callable[[History, Random], tuple[str, str]]


def trained(history: History, dice: Random) -> tuple[dict[str, Any], str, int]:
    """A commit of the lineage, one of its steps, and a group that it trained."""
    manifest = dice.choice([m for m in history.ancestors() if m["consumed"]])
    step = dice.choice(list(manifest["consumed"]))
    return manifest, step, dice.choice(manifest["consumed"][step])


def change_row(history: History, dice: Random, **changes: Any) -> str:
    """Changes a stored row."""
    step = dice.randint(1, history.step)
    at = dice.randrange(len(history.rows[step]))
    row = history.rows[step][at]
    history.rows[step][at] = replace(row, **{name: change(row) for name, change in changes.items()})
    return row.sample_id


def a_duplicate(history: History, dice: Random) -> tuple[str, str]:
    _, _, index = trained(history, dice)
    newest = history.manifests[history.lineage, history.step]
    other = dice.choice(list(newest["consumed"]))
    newest["consumed"][other].append(index)
    return "duplicate", f"g{index:07d}"


def a_group_that_is_also_dropped(history: History, dice: Random) -> tuple[str, str]:
    _, _, index = trained(history, dice)
    history.manifests[history.lineage, history.step]["ended"]["failed"].append(index)
    return "duplicate", f"g{index:07d}"


def a_loss(history: History, dice: Random) -> tuple[str, str]:
    manifest, step, index = trained(history, dice)
    manifest["consumed"][step].remove(index)
    return "loss", f"g{index:07d}"


def a_lost_group_that_was_never_trained(history: History, dice: Random) -> tuple[str, str]:
    newest = history.manifests[history.lineage, history.step]
    newest["issued"] += 1
    newest["cursor"]["offset"] += 1
    return "loss", f"g{newest['issued'] - 1:07d}"


def a_lost_step(history: History, dice: Random) -> tuple[str, str]:
    manifest, step, _ = trained(history, dice)
    del manifest["consumed"][step]
    return "loss", f"step {step}"


def a_lost_sample(history: History, dice: Random) -> tuple[str, str]:
    step = dice.randint(1, history.step)
    row = history.rows[step].pop(dice.randrange(len(history.rows[step])))
    return "loss", row.group_id


def lost_rollouts(history: History, dice: Random) -> tuple[str, str]:
    step = dice.randint(1, history.step)
    del history.rows[step]
    return "loss", f"step {step}"


def a_sample_that_is_stored_twice(history: History, dice: Random) -> tuple[str, str]:
    step, again = dice.randint(1, history.step), dice.randint(1, history.step)
    row = dice.choice(history.rows[step])
    history.rows[again].append(row)
    return "duplicate", row.sample_id


def an_altered_token(history: History, dice: Random) -> tuple[str, str]:
    at = dice.randrange(100)

    def altered(row: Any) -> Any:
        ids = row.response_ids.copy()
        ids[at % len(ids)] += 1
        return ids

    return "tokens", change_row(history, dice, response_ids=altered)


def a_token_too_many(history: History, dice: Random) -> tuple[str, str]:
    name = change_row(
        history,
        dice,
        response_ids=lambda row: np.append(row.response_ids, np.int32(7)),
        versions=lambda row: (
            *row.versions,
            VersionSpan(row.versions[-1].version, len(row.response_ids), len(row.response_ids) + 1),
        ),
    )
    return "tokens", name


def another_prompt(history: History, dice: Random) -> tuple[str, str]:
    return "tokens", change_row(history, dice, prompt_ids=lambda row: row.prompt_ids + np.int32(50))


def a_log_that_is_gone(history: History, dice: Random) -> tuple[str, str]:
    step = dice.randint(1, history.step)
    name = dice.choice(history.rows[step]).sample_id
    history.log.served = [line for line in history.log.served if line.sample != name]
    return "tokens", name


def an_old_version(history: History, dice: Random) -> tuple[str, str]:
    """Stored and drawn with a version of the lineage that is one too old for the step."""
    step = dice.randint(history.bound + 2, history.step)
    version = history.version(step - 2 - history.bound)
    row = dice.choice(history.rows[step])
    spans = [VersionSpan(version, 0, len(row.response_ids))]
    history.rows[step] = [replace(one, versions=tuple(spans)) if one is row else one for one in history.rows[step]]
    drawn = replace(
        history.log.served[0],
        request=f"{RUN}.{row.sample_id}.9",
        prompt=hash_ids(row.prompt_ids),
        prompt_tokens=len(row.prompt_ids),
        spans=hashed(row.response_ids, spans),
        finish="stop",
        time=1e9,
    )
    history.log.served.append(drawn)
    history.log.taken.append(
        replace(history.log.taken[0], version=version, server=drawn.server, incarnation=drawn.incarnation)
    )
    return "stale", row.sample_id


def a_foreign_lineage_trained_a_step(history: History, dice: Random) -> tuple[str, str]:
    manifest, step, _ = trained(history, dice)
    newest = history.manifests[history.lineage, history.step]
    if manifest is newest:  # it says which lineage is the final one
        step = dice.choice(list(newest["consumed"]))
        rows = history.rows[int(step)]
        rows[0] = replace(rows[0], trained_version=f"{RUN}/99/{int(step) - 1}")
        return "lineage", rows[0].sample_id
    manifest["lineage"] = 99
    return "lineage", f"step {step}"


def a_token_of_a_foreign_lineage(history: History, dice: Random) -> tuple[str, str]:
    def foreign(row: Any) -> Any:
        return tuple(replace(span, version=f"{RUN}/77/0") for span in row.versions)

    return "lineage", change_row(history, dice, versions=foreign)


def a_token_of_weights_to_come(history: History, dice: Random) -> tuple[str, str]:
    def later(row: Any) -> Any:
        return tuple(replace(span, version=f"{RUN}/{history.lineage}/{row.step}") for span in row.versions)

    return "lineage", change_row(history, dice, versions=later)


def another_version_than_the_server_says(history: History, dice: Random) -> tuple[str, str]:
    def other(row: Any) -> Any:
        return tuple(replace(span, version="never/0/0") for span in row.versions)

    return "version", change_row(history, dice, versions=other)


def a_version_that_was_never_published(history: History, dice: Random) -> tuple[str, str]:
    step = dice.randint(1, history.step)
    row = dice.choice(history.rows[step])
    gone = row.versions[0].version
    history.log.taken = [taken for taken in history.log.taken if taken.version != gone]
    return "version", row.sample_id


def two_groups_of_one_prompt(history: History, dice: Random) -> tuple[str, str]:
    rows = [row for _, rows in sorted(history.rows.items()) for row in rows]
    first = rows[0]
    other = next((row for row in rows if row.group_id != first.group_id), first)
    for step, stored in history.rows.items():
        history.rows[step] = [
            replace(row, row_id=first.row_id, epoch=first.epoch) if row.group_id == other.group_id else row
            for row in stored
        ]
    return "position", other.group_id


def another_place_of_the_cursor(history: History, dice: Random) -> tuple[str, str]:
    history.manifests[history.lineage, history.step]["cursor"]["epoch"] += 1
    return "position", "the cursor"


def an_update_that_was_applied_twice(history: History, dice: Random) -> tuple[str, str]:
    manifest = dice.choice(history.ancestors())
    manifest["trainer"]["optimizer_steps"] += 1
    return "books", f"step {manifest['step']}"


def counters_that_do_not_add_up(history: History, dice: Random) -> tuple[str, str]:
    manifest = dice.choice(history.ancestors())
    manifest["ledger"]["issued"] += 1
    return "books", f"step {manifest['step']}"


PLANTS = [
    a_duplicate,
    a_group_that_is_also_dropped,
    a_loss,
    a_lost_group_that_was_never_trained,
    a_lost_step,
    a_lost_sample,
    lost_rollouts,
    a_sample_that_is_stored_twice,
    an_altered_token,
    a_token_too_many,
    another_prompt,
    a_log_that_is_gone,
    an_old_version,
    a_foreign_lineage_trained_a_step,
    a_token_of_a_foreign_lineage,
    a_token_of_weights_to_come,
    another_version_than_the_server_says,
    a_version_that_was_never_published,
    two_groups_of_one_prompt,
    another_place_of_the_cursor,
    an_update_that_was_applied_twice,
    counters_that_do_not_add_up,
]


@pytest.mark.parametrize("plant", PLANTS)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), trouble=st.sampled_from([0.0, 0.2, 0.4]), bound=st.integers(0, 2))
def test_what_is_planted_is_found_and_named(plant: Plant, seed: int, trouble: float, bound: int) -> None:
    history = History(Random(seed), steps=6, size=9, trouble=trouble, bound=bound)
    kind, subject = plant(history, Random(seed))
    found = audit(history.evidence())
    assert not found.balanced
    named = [one for one in found.findings if one.kind == kind]
    assert any(one.subject == subject or one.subject.startswith(f"{subject}.") for one in named), words(found)
    assert summary(found.findings)[kind] == len(named)


def test_steps_after_the_last_commit_are_no_fault() -> None:
    history = History(Random(1), steps=4, trouble=0)
    history.rows[5] = copy.copy(history.rows[4])
    found = audit(history.evidence())
    assert found.balanced
    assert found.uncommitted == [5]


def test_a_manifest_of_an_older_version_is_refused() -> None:
    history = History(Random(1))
    del history.manifests[history.lineage, history.step]["in_flight"]
    with pytest.raises(BadInputError, match="the manifest of step 6 has no 'in_flight'"):
        audit(history.evidence())


def test_a_row_may_have_several_turns_in_an_epoch_where_files_have_weights() -> None:
    history = History(Random(1), steps=2, size=9, trouble=0)
    two_groups_of_one_prompt(history, Random(1))
    newest = history.manifests[history.lineage, history.step]
    newest["cursor"] |= {"weights": [0.5, 1.5], "epoch_rows": 9, "size": 7}
    assert audit(history.evidence()).balanced
    newest["cursor"]["weights"] = [0.5, 1.0]
    assert summary(audit(history.evidence()).findings) == {"position": 1}


def test_a_half_written_line_is_a_note() -> None:
    history = History(Random(1))
    history.log.unreadable = ["requests-a.jsonl:7"]
    found = audit(history.evidence())
    assert found.balanced
    assert found.notes == ["1 lines of request logs cannot be read, the first requests-a.jsonl:7"]


def test_a_response_in_parts_needs_each_part() -> None:
    """The rest behind a prefix that no server drew is not enough."""
    for seed in range(200):
        history = History(Random(seed), steps=3, trouble=0)
        parts = {
            row.sample_id: [line for line in history.log.served if line.sample == row.sample_id]
            for rows in history.rows.values()
            for row in rows
        }
        name, lines = next(((name, lines) for name, lines in parts.items() if len(lines) == 2), ("", []))
        if lines:
            break
    history.log.served.remove(lines[0])
    found = audit(history.evidence())
    (finding,) = found.findings
    assert (finding.kind, finding.subject) == ("tokens", name)
    assert f"tokens 0 to {lines[0].end - 1} of" in finding.message
