"""promtool on the rules and their cases."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.deploy
ROOT = Path(__file__).resolve().parents[2]


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    assert program, "promtool is not installed: see docs/deployment.md, Test the deployment"
    return subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_rules_are_valid_and_every_case_ends_as_it_says() -> None:
    checked = promtool("check", "rules", "deploy/helm/nightshift/files/rules.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = promtool("test", "rules", "deploy/prometheus/tests.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize(
    ("old", "new", "alert"),
    [
        ("nightshift_ledger_imbalance_groups != 0", "nightshift_ledger_imbalance_groups > 0", "LedgerOutOfBalance"),
        ("size_bytes < 0.1", "size_bytes < 0.5", "DiskNearlyFull"),
        ("growth1h > 3", "growth1h > 30", "NotLearning"),
    ],
)
def test_the_cases_notice_a_rule_that_was_changed(tmp_path: Path, old: str, new: str, alert: str) -> None:
    rules = (ROOT / "deploy/helm/nightshift/files/rules.yaml").read_text()
    assert old in rules
    (tmp_path / "rules.yaml").write_text(rules.replace(old, new))
    cases = (
        (ROOT / "deploy/prometheus/tests.yaml").read_text().replace("../helm/nightshift/files/rules.yaml", "rules.yaml")
    )
    (tmp_path / "tests.yaml").write_text(cases)
    tested = promtool("test", "rules", str(tmp_path / "tests.yaml"))
    assert tested.returncode != 0
    assert alert in tested.stdout + tested.stderr
