"""From a dead server's log to one sentence."""

import pytest

from services.rollout.diagnosis import diagnose

ECHO = (
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
)


@pytest.mark.parametrize(
    ("log", "code", "cause", "fix"),
    [
        ("ERROR: [Errno 98] error while attempting to bind on address", 1, "port 8000 is taken", "resources.ports"),
        ("OSError: [Errno 98] Address already in use", 1, "port 8000 is taken", "resources.ports"),
        ("api_server.py: error: unrecognized arguments: --no-such", 2, "--no-such", "extra_args"),
        ("ModuleNotFoundError: No module named 'vllm'", 1, "module vllm is missing", "Install"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", 1, "out of memory", "kv_cache_gib"),
        (
            "ValueError: Available memory on node 0 (1.0/2.0 GiB) on startup is less than needed",
            1,
            "less than",
            "memory",
        ),
        ("starting\n", -9, "SIGKILL", "memory"),
        ("starting\n", 137, "SIGKILL", "memory"),
        ("starting\n", -11, "signal 11", "log"),
        ("", 3, "exit code 3", "log"),
    ],
)
def test_known_causes(log, code, cause, fix):
    found, remedy = diagnose(log, code, 8000)
    assert cause in found
    assert fix in remedy


def test_the_root_error_is_named_and_not_its_echo():
    log = f"INFO ok\n(EngineCore pid=2) ERROR 01-01 ValueError: head size 7 is not supported\nTraceback\n{ECHO}\n"
    assert diagnose(log, 1, 1)[0] == "ValueError: head size 7 is not supported"


def test_a_long_error_is_cut():
    assert len(diagnose("ValueError: " + "x" * 5000, 1, 1)[0]) <= 300


def test_the_lines_below_a_validation_error_are_what_it_says():
    log = (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, max_model_len (9) is greater than 8. [type=value_error, input_value=Args(1)]\n"
        "    For further information visit a page\n"
    )
    assert diagnose(log, 1, 1)[0] == "Value error: max_model_len (9) is greater than 8."
