"""The example of an estimator of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from nightshift.algorithms import compute_advantages
from nightshift.config.algorithm import AlgorithmConfig
from nightshift.config.load import load_job
from tests.fixtures.samples import make_sample

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "custom_algorithm"


def test_the_example_is_short_and_its_job_names_it() -> None:
    assert len((FOLDER / "median_baseline.py").read_text().splitlines()) < 40
    spec = load_job(FOLDER / "job.yaml", check_files=False)
    assert spec.algorithm.estimator == f"{FOLDER / 'median_baseline.py'}:median_baseline"


def test_the_example_compares_each_sample_with_the_median_of_its_group() -> None:
    config = AlgorithmConfig(estimator=f"{FOLDER / 'median_baseline.py'}:median_baseline")
    rewards = {"a": [1.0, 0.0, 0.0, None], "b": [2.0, 2.0, 2.0, 2.0]}
    samples = [make_sample(f"{g}.{n}", reward=r) for g, values in rewards.items() for n, r in enumerate(values)]
    compute_advantages(samples, config)
    got = [float(sample.advantages[0]) for sample in samples]  # type: ignore[index]
    assert got == pytest.approx([3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], abs=1e-4)
