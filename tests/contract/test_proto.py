"""The checked-in gRPC stubs are what the .proto files give."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUBS = Path("nightshift/wire/v1")


def test_stubs_are_current(tmp_path):
    """Generated with the pinned grpcio-tools of requirements/dev.txt, as `make proto` does."""
    subprocess.run(
        ["bash", str(ROOT / "proto/generate.sh"), str(tmp_path)],
        check=True,
        env={**os.environ, "PYTHON": sys.executable},
        timeout=60,
    )
    made = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / STUBS).iterdir()}
    kept = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / STUBS).glob("*_pb2*")}
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name] != kept[name]] == [], "run make proto"


def test_no_module_is_named_proto():
    """An importable `proto` package would shadow proto-plus, which Ray's dependencies import."""
    assert not list((ROOT / "proto").glob("**/*.py"))
