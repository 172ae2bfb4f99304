"""What a job that cannot be deployed is told."""

import shutil
import socket
import time
from pathlib import Path

import pytest
from ray import serve

from nightshift.wire.errors import BadInputError, RoleError
from services.scorers import deploy

pytestmark = pytest.mark.integration


@pytest.fixture
def reward(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def score(response):\n    return 1")
    return path


def sentence(caught) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_reward_that_cannot_be_used_is_refused_before_serve_starts(cluster, port, make_spec, reward):
    reward.write_text("import nothing_of_this_name")
    began = time.monotonic()
    with pytest.raises(BadInputError) as caught:
        deploy.deploy(make_spec({"function": f"{reward}:score"}), port, None, "run")
    assert sentence(caught).startswith(f"[reward] {reward} cannot be imported: ModuleNotFoundError")
    assert time.monotonic() - began < 60, "Serve was started for it"
    assert not serve.status().applications


def test_a_missing_reference_is_refused_before_serve_starts(cluster, port, make_spec, reward, tmp_path):
    spec = make_spec({"function": f"{reward}:score"}, scorers={"reference": {"model": str(tmp_path / "none")}})
    with pytest.raises(BadInputError) as caught:
        deploy.deploy(spec, port, None, "run")
    assert sentence(caught).startswith(f"[reference] there is no model in {tmp_path}/none")


def test_a_taken_port_is_named(cluster, port, make_spec, reward):
    with socket.create_server(("127.0.0.1", port)), pytest.raises(RoleError) as caught:
        deploy.deploy(make_spec({"function": f"{reward}:score"}), port, None, "run")
    assert sentence(caught) == (
        f"[scorers] port {port} on 127.0.0.1 cannot be used: Address already in use. "
        "Set resources.ports.scorers to another port, or to 0"
    )


def test_a_model_that_cannot_be_loaded_is_named_with_its_cause(
    cluster, port, make_spec, reward, model_folder, tmp_path
):
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    spec = make_spec({"function": f"{reward}:score"}, scorers={"reference": {"model": str(broken)}})
    with pytest.raises(RoleError) as caught:
        deploy.deploy(spec, port, None, "run")
    assert caught.value.role == "reference"
    assert f"the model in {broken} cannot be loaded: " in sentence(caught)
    assert not serve.status().applications


def test_a_scorer_that_does_not_start_in_time_is_named(cluster, port, make_spec, reward, tmp_path):
    flag = tmp_path / "checked"
    reward.write_text(
        "import pathlib, time\n"
        f"flag = pathlib.Path({str(flag)!r})\n"
        "if flag.exists():\n    time.sleep(3600)\n"
        "flag.touch()\n"
        "def score(response):\n    return 1"
    )
    spec = make_spec({"function": f"{reward}:score"}, algorithm={"kl_coef": 0.0}, scorers={"start_timeout_s": 8})
    with pytest.raises(RoleError) as caught:
        deploy.deploy(spec, port, None, "run")
    assert caught.value.role == "reward"
    assert "waited 8 s for" in sentence(caught)


def test_after_a_failure_the_same_port_serves_the_next_job_and_nothing_is_left(cluster, port, make_spec, reward):
    spec = make_spec({"function": f"{reward}:score"}, algorithm={"kl_coef": 0.0})
    assert deploy.deploy(spec, port, None, "run")["reference"] is None
    deploy.undeploy()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if str(reward).encode() in command_line(pid)]


def command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""
