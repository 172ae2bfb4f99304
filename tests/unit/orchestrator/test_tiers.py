"""What a vLLM server that is known by its URL may be used for."""

from __future__ import annotations

from typing import Any

import pytest

from nightshift.wire.errors import RoleError
from orchestrator.runner.capabilities import GENERATE
from orchestrator.runner.tiers import COMPLETIONS, Tier, standing

THERE = {"/is_paused": 200, "/weight_info": 200, GENERATE: 400, COMPLETIONS: 422}
INFO: dict[str, Any] = {
    "vllm_version": "0.28.0",
    "routes": [GENERATE, "/update_weights", "/pause"],
    "capabilities": {"pause": True, "update_phases": True, "weight_version": True},
}


def test_a_server_that_takes_weights_and_counts_versions_is_full() -> None:
    found = standing("s", None, "0.32.0", THERE)
    assert (found.tier, found.vllm, found.why_not_full) == (Tier.FULL, "0.32.0", "")
    assert standing("s", INFO, "", {GENERATE: 404}).tier is Tier.FULL


@pytest.mark.parametrize(
    ("info", "version", "missing", "fix"),
    [
        (None, "0.32.1", ["/is_paused", "/weight_info"], "VLLM_SERVER_DEV_MODE=1"),
        ({**INFO, "capabilities": {}}, "", ["/is_paused"], "VLLM_SERVER_DEV_MODE=1"),
        ({**INFO, "capabilities": {"pause": True}}, "", [], "--weight-transfer-config"),
    ],
)
def test_one_that_takes_no_weights_has_versions(info: Any, version: str, missing: list[str], fix: str) -> None:
    found = standing("s", info, version, THERE | dict.fromkeys(missing, 404))
    assert found.tier is Tier.VERSIONS
    assert found.generate
    assert "does not offer" in found.why_not_full
    assert fix in found.fix


@pytest.mark.parametrize(
    ("version", "missing"),
    [("0.32.0", [GENERATE]), ("0.28.0", []), ("0.7.0", [GENERATE, "/is_paused", "/weight_info"]), ("", [GENERATE])],
)
def test_one_that_only_completes_is_plain(version: str, missing: list[str]) -> None:
    found = standing("s", None, version, THERE | dict.fromkeys(missing, 403))
    assert found.tier is Tier.PLAIN
    assert not found.generate
    assert found.why_not_full


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(RoleError, match="s offers neither /inference/v1/generate nor /v1/completions"):
        standing("s", None, "", dict.fromkeys(THERE, 404))
