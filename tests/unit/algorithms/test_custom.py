"""Estimators of the user's own."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from nightshift.algorithms import check_estimator, compute_advantages
from nightshift.config.algorithm import AlgorithmConfig
from nightshift.wire.errors import BadInputError, NightshiftError
from nightshift.wire.experience import Sample
from tests.fixtures.samples import make_sample


def _write(folder: Path, body: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(body), encoding="utf-8")
    return path


def _samples() -> list[Sample]:
    return [make_sample("a.0", mask=[1, 0, 1], reward=2.0), make_sample("a.1", tokens=2, reward=None)]


def _run(path: Path, function: str = "mine") -> list[Sample]:
    samples = _samples()
    compute_advantages(samples, AlgorithmConfig(estimator=f"{path}:{function}"))
    return samples


def test_one_number_per_sample(tmp_path: Path) -> None:
    samples = _run(_write(tmp_path, "def mine(batch, config):\n    return batch.rewards * config.gamma\n"))
    assert list(samples[0].advantages) == [2, 0, 2]  # type: ignore[arg-type]
    assert list(samples[1].advantages) == [0, 0]  # type: ignore[arg-type]


def test_one_array_per_sample(tmp_path: Path) -> None:
    body = """
        import numpy as np

        def mine(batch, config):
            return [np.arange(len(mask)) + 1.0 for mask in batch.masks]
    """
    samples = _run(_write(tmp_path, body))
    assert list(samples[0].advantages) == [1, 0, 3]  # type: ignore[arg-type]
    assert list(samples[1].advantages) == [0, 0]  # type: ignore[arg-type]


def test_a_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "estimators_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be run by a check')", encoding="utf-8")
    _write(package, "def first(batch, config):\n    return [1.0] * len(batch)\n", "deep.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    check_estimator("estimators_of_mine.deep.first")
    assert "estimators_of_mine" not in sys.modules
    with pytest.raises(BadInputError, match="must not be run"):
        compute_advantages(_samples(), AlgorithmConfig(estimator="estimators_of_mine.deep.first"))
    (package / "__init__.py").write_text("", encoding="utf-8")
    samples = _samples()
    compute_advantages(samples, AlgorithmConfig(estimator="estimators_of_mine.deep.first"))
    assert list(samples[0].advantages) == [1, 0, 1]  # type: ignore[arg-type]


def test_checking_runs_nothing_of_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path, "raise SystemExit('run')\n\ndef mine(batch, config):\n    return []\n")
    check_estimator(f"{path}:mine")


@pytest.mark.parametrize(
    ("signature", "allowed"),
    [
        ("batch, config", True),
        ("batch, config, scale=2.0", True),
        ("*args", True),
        ("batch, /, config", True),
        ("batch, config, *, scale=1.0", True),
        ("", False),
        ("batch", False),
        ("batch, config, more", False),
        ("batch, config, *, scale", False),
        ("**kwargs", False),
    ],
)
def test_the_signature_is_checked_before_anything_runs(tmp_path: Path, signature: str, allowed: bool) -> None:
    path = _write(tmp_path, f"def mine({signature}):\n    return [0.0, 0.0]\n")
    if allowed:
        check_estimator(f"{path}:mine")
        _run(path)
    else:
        with pytest.raises(BadInputError, match="batch, config"):
            check_estimator(f"{path}:mine")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("grop", "'grpo'"),
        ("nothing_like_it", "reinforce_plus_plus"),
        ("no_such_file.py:mine", "cannot be read"),
        ("no_such_package_at_all.module.mine", "no_such_package_at_all"),
        ("nightshift.no_such_module.mine", "nightshift.no_such_module"),
        ("math.sqrt", "with a source in Python"),
        ("sys.path", "with a source in Python"),
        ("not a name.at all", "neither"),
        ("file.txt:mine", "path.py:function"),
    ],
)
def test_an_unknown_name_is_refused(name: str, words: str) -> None:
    with pytest.raises(BadInputError) as caught:
        check_estimator(name)
    assert words in str(caught.value)
    assert "algorithm.estimator" in str(caught.value)


def test_an_estimator_without_its_critic_is_refused() -> None:
    check_estimator("gae")
    check_estimator("grpo", has_critic=False)
    with pytest.raises(BadInputError, match="critic"):
        check_estimator("gae", has_critic=False)


def test_a_missing_function_is_refused_with_the_nearest(tmp_path: Path) -> None:
    path = _write(tmp_path, "def mine(batch, config):\n    return []\n")
    with pytest.raises(BadInputError, match="mine"):
        check_estimator(f"{path}:mien")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return None", "NoneType"),
        ("return 3.0", "float"),
        ("return [1.0]", "1 values"),
        ("return ['x', 1.0]", "'x'"),
        ("return [float('nan'), 0.0]", "not finite"),
        ("return [[1.0, 2.0], 0.0]", "shape"),
        ("raise KeyError('deep')", "KeyError"),
    ],
)
def test_a_result_that_cannot_be_used_names_the_function(tmp_path: Path, body: str, words: str) -> None:
    path = _write(tmp_path, f"def mine(batch, config):\n    {body}\n")
    with pytest.raises(NightshiftError) as caught:
        _run(path)
    assert words in str(caught.value)
    assert f"{path}:mine" in str(caught.value)


def test_a_name_bound_to_something_else_is_refused_when_loaded(tmp_path: Path) -> None:
    path = _write(tmp_path, "mine = 3\n")
    with pytest.raises(BadInputError, match="not a function"):
        _run(path)


def test_a_batch_shows_groups_and_rewards(tmp_path: Path) -> None:
    body = """
        import numpy as np

        def mine(batch, config):
            assert len(batch) == 2 and batch.values is None and batch.ref_logprobs is None
            assert [list(group) for group in batch.groups()] == [[0, 1]]
            assert list(batch.scored) == [True, False] and batch.bootstraps.shape == (2,)
            assert batch.logprobs[0].dtype == np.float32
            return batch.sequence_rewards()
    """
    samples = _run(_write(tmp_path, body))
    assert np.array_equal(samples[0].advantages, np.float32([2, 0, 2]))
