"""The direction of imports, and what the command line loads."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def rules() -> ModuleType:
    """The checker of ``make lint``."""
    spec = importlib.util.spec_from_file_location("import_rules", ROOT / "scripts" / "import_rules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_room_imports_against_the_direction() -> None:
    assert rules().breaches(ROOT) == []


@pytest.mark.parametrize(
    ("path", "source", "allowed"),
    [
        ("nightshift/cli/x.py", "import torch", False),
        ("nightshift/cli/x.py", "def f():\n    import transformers.models", False),
        ("nightshift/cli/x.py", "from services.agent import models", False),
        ("nightshift/cli/x.py", "import orchestrator", False),
        ("nightshift/cli/x.py", "import numpy, tokenizers", True),
        ("orchestrator/runner/x.py", "from nightshift.wire import trace", True),
        ("orchestrator/runner/x.py", "from services.rollout import launch", False),
        ("orchestrator/runner/x.py", "def f():\n    import ray", False),
        ("services/trainer/x.py", "import torch, ray, deepspeed", True),
        ("services/trainer/x.py", "from services import scorers", False),
        ("services/trainer/x.py", "from services.trainer import rank", True),
        ("services/trainer/x.py", "from orchestrator.runner import group", False),
        ("services/agent/x.py", "from services.trainer import launch", True),
        ("services/agent/x.py", "from orchestrator.runner import group", False),
    ],
)
def test_breaches_are_seen(path: str, source: str, allowed: bool) -> None:
    checker = rules()
    module = Path(path).with_suffix("").parts
    found = [checker.forbidden(module, name) for _, name in checker.imported(ast.parse(source))]
    assert all(reason is None for reason in found) == allowed


def test_command_line_loads_nothing_heavy() -> None:
    code = (
        "import sys; import nightshift.cli.main; import nightshift.config.load; import nightshift.cli.run; "
        "print(sorted({name.partition('.')[0] for name in sys.modules}"
        " & {'torch', 'ray', 'vllm', 'deepspeed', 'transformers'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_loads_only_what_it_shows() -> None:
    """Start-up stays short as long as none of these is loaded; a clock would measure the machine instead."""
    code = (
        "import sys; import nightshift.cli.main; "
        "print(sorted({name.partition('.')[0] for name in sys.modules}"
        " & {'numpy', 'pyarrow', 'pydantic', 'omegaconf', 'grpc', 'opentelemetry', 'tokenizers', 'httpx'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
