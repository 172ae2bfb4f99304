"""Makes the prompts of the first run: ``python examples/first_run/make_data.py [--out DIR]``.

Two tasks, each with a training and a held-out file in verl's columns (prompt, data_source, reward_model, extra_info):

- ``lastword``: name the last of five words. Learned within the demo.
- ``twice``: name the word that stands twice among five. Harder: no place in the list is right more often than another.

The same seed gives the same files. No question of a held-out file, nor the example that every prompt shows, is in a
training file.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

SEED = 20
TRAIN_ROWS = 1024
TEST_ROWS = 200

INSTRUCTION = "Reply with the answer only."
WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "tiger",
    "music",
    "green",
    "bread",
    "chair",
    "light",
    "ocean",
    "paper",
    "horse",
    "plant",
    "sugar",
    "water",
    "house",
    "dream",
    "train",
    "garden",
    "window",
    "silver",
    "winter",
    "summer",
    "yellow",
    "monkey",
    "rabbit",
    "pencil",
    "bottle",
    "orange",
    "mountain",
    "forest",
]

ROW = pa.schema(
    [
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("data_source", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64())])),
    ]
)


class Question(NamedTuple):
    """What is asked, and the one right answer."""

    text: str
    answer: str


def last_word(words: list[str]) -> Question:
    """The question after the last of some words."""
    text = f"Last word: {', '.join(words)}"
    return Question(text, words[-1])


def twice(words: list[str]) -> Question:
    """The question after the word that stands twice."""
    text = f"Twice: {', '.join(words)}"
    return Question(text, next(word for word in words if words.count(word) == 2))


def draw_last_word(rng: random.Random) -> Question:
    """Five different words."""
    return last_word(rng.sample(WORDS, 5))


def draw_twice(rng: random.Random) -> Question:
    """Four different words and one of them once more, in any order."""
    words = rng.sample(WORDS, 4)
    words.append(words[0])
    rng.shuffle(words)
    return twice(words)


class Task(NamedTuple):
    """How a task's questions are drawn, and the solved one that each prompt shows first."""

    draw: Callable[[random.Random], Question]
    example: Question


TASKS = {
    "lastword": Task(draw_last_word, last_word(["sugar", "bottle", "summer", "dream", "silver"])),
    "twice": Task(draw_twice, twice(["sugar", "bottle", "summer", "bottle", "silver"])),
}


def messages(task: Task, question: Question) -> list[dict[str, str]]:
    """The chat: an instruction, one solved example, then the question."""
    return [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": task.example.text},
        {"role": "assistant", "content": task.example.answer},
        {"role": "user", "content": question.text},
    ]


def rows(name: str, seed: int = SEED) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The training and the held-out rows of a task.

    The held-out questions are drawn first and differ from each other. Training questions may repeat, as in any stream.
    """
    task = TASKS[name]
    rng = random.Random(f"{name} {seed}")
    seen = {task.example.text}
    held_out: list[Question] = []
    while len(held_out) < TEST_ROWS:
        question = task.draw(rng)
        if question.text not in seen:
            seen.add(question.text)
            held_out.append(question)
    train: list[Question] = []
    while len(train) < TRAIN_ROWS:
        question = task.draw(rng)
        if question.text not in seen:
            train.append(question)

    def row(question: Question, split: str, index: int) -> dict[str, Any]:
        return {
            "prompt": messages(task, question),
            "data_source": f"first_run/{name}",
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {"split": split, "index": index},
        }

    return (
        [row(question, "train", index) for index, question in enumerate(train)],
        [row(question, "test", index) for index, question in enumerate(held_out)],
    )


def write(folder: Path, seed: int = SEED) -> list[Path]:
    """Writes ``<folder>/<task>/train.parquet`` and ``test.parquet`` of each task; returns the paths."""
    written = []
    for name in TASKS:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for split, content in zip(("train", "test"), rows(name, seed), strict=True):
            path = folder / name / f"{split}.parquet"
            pq.write_table(pa.Table.from_pylist(content, schema=ROW), path)
            written.append(path)
    return written


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Make the prompts of the first run.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "data", help="folder to write to")
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    for path in write(arguments.out, arguments.seed):
        print(f"{path} ({pq.read_metadata(path).num_rows} rows)")


if __name__ == "__main__":
    main()
