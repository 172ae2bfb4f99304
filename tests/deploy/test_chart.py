"""The chart: it lints, renders valid objects for Kubernetes 1.28 to 1.34, and keeps the rules of a guarded cluster."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from ray.serve.schema import DeploymentSchema

from nightshift.config import JobSpec
from nightshift.config.site import with_site
from nightshift.transfer import weight_transfer
from services.rollout.command import server_command
from tests.deploy.charts import CHART, VALUES, VERSIONS, check, helm, of_kind, pods, rendered
from tests.unit.deploy.promql import unknown_names

pytestmark = pytest.mark.deploy


@pytest.mark.parametrize("values", VALUES)
def test_it_lints(values: str) -> None:
    done = helm("lint", "--strict", ".", *([] if values == "values.yaml" else ["-f", values]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout, "helm lint reports what a template requires as a warning only"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", VALUES)
def test_every_object_is_valid(values: str, version: str) -> None:
    for document in rendered(values, version):
        check(document, version)


def test_the_schemas_find_planted_faults() -> None:
    both = [*rendered("values-kuberay.yaml"), *rendered("values-prod.yaml")]
    objects = {one["kind"]: one for one in json.loads(json.dumps(both))}

    def refused(kind: str, path: list[Any], value: Any) -> None:
        document = json.loads(json.dumps(objects[kind]))
        place = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(AssertionError, match=kind):
            check(document, "1.31")

    refused("Deployment", ["spec", "replicas"], "one")
    refused("Deployment", ["spec", "template", "spec", "containers", 0, "resourcez"], {})
    refused("NetworkPolicy", ["spec", "policyTypez"], [])
    refused("RayCluster", ["spec", "workerGroupSpecs", 0, "replicas"], "1")
    refused("RayCluster", ["spec", "workerGroupSpecs", 0, "maxReplicaz"], 1)
    refused("RayService", ["spec", "rayClusterConfig", "headGroupSpec", "templat"], {})
    refused("LeaderWorkerSet", ["spec", "leaderWorkerTemplate", "sizes"], 2)
    refused("ServiceMonitor", ["spec", "endpoints", 0, "port"], 5)
    refused("ScaledObject", ["spec", "maxReplicaCount"], "8")
    refused("PrometheusRule", ["spec", "groups"], "none")
    with pytest.raises(AssertionError, match="no schema knows it"):
        check({"apiVersion": "nowhere/v1", "kind": "Unheard", "metadata": {"name": "x"}}, "1.31")


# Policies ------------------------------------------------------------------------------------------------------------

PODS = [
    pytest.param(name, spec, id=f"{values.removesuffix('.yaml')}-{name}")
    for values in VALUES
    for name, spec in pods(rendered(values))
]


@pytest.mark.parametrize(("name", "spec"), PODS)
def test_a_pod_is_not_root_and_its_root_is_read_only(name: str, spec: dict[str, Any]) -> None:
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
    assert spec["automountServiceAccountToken"] is False
    assert not any("hostPath" in volume for volume in spec.get("volumes", []))
    for container in spec["containers"] + spec.get("initContainers", []):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(("name", "spec"), PODS)
def test_a_container_has_limits_and_a_pinned_image(name: str, spec: dict[str, Any]) -> None:
    for container in spec["containers"]:
        for amount in ("cpu", "memory"):
            assert container["resources"]["requests"][amount]
            assert container["resources"]["limits"][amount]
        gpus = {kind: container["resources"][kind].get("nvidia.com/gpu") for kind in ("requests", "limits")}
        assert gpus["requests"] == gpus["limits"]
        image = container["image"]
        assert re.search(r"(@sha256:[0-9a-f]{64}|:[\w.-]+)$", image), "an image without a tag is :latest"
        assert not image.endswith(":latest")


@pytest.mark.parametrize(("name", "spec"), [param for param in PODS if "-test" not in (param.id or "")])
def test_a_container_that_serves_has_probes_and_drains(name: str, spec: dict[str, Any]) -> None:
    for container in spec["containers"]:
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
        assert container["lifecycle"]["preStop"]
        ports = {port["name"] for port in container["ports"]}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            if "--headless" in container.get("args", []):
                # It listens nowhere: its leader is asked.
                assert "LWS_LEADER_ADDRESS" in container[kind]["exec"]["command"][-1]
                continue
            port = container[kind]["httpGet"]["port"]
            assert port in ports or isinstance(port, int)
    assert spec["terminationGracePeriodSeconds"] >= 60


@pytest.mark.parametrize(("name", "spec"), PODS)
def test_secrets_come_by_reference(name: str, spec: dict[str, Any]) -> None:
    for container in spec["containers"]:
        for variable in container.get("env", []):
            if re.search(r"TOKEN|SECRET|PASSWORD|DATABASE_URL|API_KEY|CREDENTIAL", variable["name"]):
                assert set(variable) == {"name", "valueFrom"}
                assert "secretKeyRef" in variable["valueFrom"]
        assert not re.search(r"--?(api-)?(token|key|password)=", " ".join(container.get("args", [])))


@pytest.mark.parametrize("values", VALUES)
def test_the_chart_makes_no_secret_and_no_right_on_the_cluster(values: str) -> None:
    kinds = {one["kind"] for one in rendered(values)}
    assert not kinds & {"Secret", "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}


@pytest.mark.parametrize("values", [name for name in VALUES if name != "values-cpu.yaml"])
def test_every_serving_pod_is_behind_a_network_policy(values: str) -> None:
    objects = rendered(values)
    policies = of_kind(objects, "NetworkPolicy")
    (default,) = [one for one in policies if one["metadata"]["name"].endswith("-default")]
    assert default["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in default["spec"]
    guarded = {one["spec"]["podSelector"]["matchLabels"].get("app.kubernetes.io/component") for one in policies}
    components = {
        one["metadata"]["labels"]["app.kubernetes.io/component"]
        for kind in ("Deployment", "StatefulSet", "LeaderWorkerSet", "RayCluster", "RayService")
        for one in of_kind(objects, kind)
    }
    assert components <= guarded


def server_of(objects: Any) -> dict[str, Any]:
    """The StatefulSet of the rollout servers."""
    (found,) = [one for one in of_kind(objects, "StatefulSet") if one["metadata"]["name"].endswith("-rollout")]
    return found


def test_only_the_orchestrator_and_prometheus_reach_a_rollout_server() -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(rendered("values-prod.yaml"), "NetworkPolicy")}
    sources = [source for rule in policies["release-nightshift-rollout"]["ingress"] for source in rule["from"]]
    labels = [json.dumps(source, sort_keys=True) for source in sources]
    assert len(labels) == 2
    assert any('"orchestrator"' in text for text in labels)
    assert any('"monitoring"' in text for text in labels)


def test_trainer_and_other_nodes_reach_a_server_of_several_nodes() -> None:
    objects = rendered("values-kuberay.yaml")
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "NetworkPolicy")}
    sources = [source for rule in policies["release-nightshift-rollout"]["ingress"] for source in rule["from"]]
    labels = [json.dumps(source, sort_keys=True) for source in sources]
    assert len(labels) == 4
    assert any('"orchestrator"' in text for text in labels)
    assert any('"trainer"' in text for text in labels)
    assert any('"rollout-worker"' in text for text in labels)
    assert any('"monitoring"' in text for text in labels)


# What belongs together -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", VALUES)
def test_selectors_find_their_pods(values: str) -> None:
    objects = rendered(values)
    labels = [
        one["spec"]["template"]["metadata"]["labels"]
        for kind in ("Deployment", "StatefulSet")
        for one in of_kind(objects, kind)
    ]
    groups = [one["spec"]["leaderWorkerTemplate"] for one in of_kind(objects, "LeaderWorkerSet")]
    labels += [group["leaderTemplate"]["metadata"]["labels"] for group in groups]
    workers = [group["workerTemplate"]["metadata"]["labels"] for group in groups]
    for one in of_kind(objects, "Deployment") + of_kind(objects, "StatefulSet"):
        wanted = one["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= one["spec"]["template"]["metadata"]["labels"].items()
        assert not any("version" in key or "chart" in key for key in wanted), "an upgrade could not change them"
    for service in of_kind(objects, "Service"):
        assert any(service["spec"]["selector"].items() <= found.items() for found in labels)
        assert not any(service["spec"]["selector"].items() <= found.items() for found in workers), "they answer nothing"
    services = [(one["metadata"]["labels"], one["spec"]["ports"]) for one in of_kind(objects, "Service")]
    for monitor in of_kind(objects, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        (ports,) = [ports for found, ports in services if wanted.items() <= found.items()]
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= {port["name"] for port in ports}


def test_a_rollout_pod_has_the_flags_of_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    spec = JobSpec.model_validate(
        {
            "name": "x",
            "model": {"path": str(tmp_path)},
            "data": {"train_files": ["x"], "max_prompt_length": 16},
            "rewards": [{"function": "x.py:f"}],
            "rollout": {"batch_size": 1, "n": 2, "max_response_length": 16},
        }
    )
    command = server_command(
        spec,
        port=1,
        token="t",
        store=tmp_path,
        device="cuda",
        weight_backend="safetensors",
        weights_url="http://x",
        vllm_version=(0, 32),
    )
    launcher = {argument for argument in command.argv if argument.startswith("--")}
    server = server_of(rendered("values-prod.yaml"))
    container = server["spec"]["template"]["spec"]["containers"][0]
    chart = {argument.partition("=")[0] for argument in container["args"]}
    #: Of one machine, of a job, or decided by the version at hand.
    own = {"--seed", "--compilation-config", "--attention-backend", "--gpu-memory-utilization", "--tokenizer"}
    assert launcher - chart - own == set()
    assert chart - launcher == {"--tensor-parallel-size"}
    assert json.loads(
        container["args"][[a.startswith("--weight-transfer") for a in container["args"]].index(True)].split("=", 1)[1]
    )
    variables = {variable["name"] for variable in container["env"]}
    needed = {
        "NIGHTSHIFT_WEIGHT_URL",
        "NIGHTSHIFT_ROLLOUT_TOKEN",
        "VLLM_SERVER_DEV_MODE",
        "VLLM_NO_USAGE_STATS",
        "DO_NOT_TRACK",
        "HF_HUB_OFFLINE",
    }
    assert needed <= variables & command.env.keys()


def test_rules_and_dashboards_are_those_of_the_repository() -> None:
    objects = rendered("values-prod.yaml")
    (rule,) = of_kind(objects, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "files/rules.yaml").read_text())
    files = {name: text for one in of_kind(objects, "ConfigMap") for name, text in one["data"].items()}
    assert files == {path.name: path.read_text() for path in (CHART / "files/dashboards").glob("*.json")}


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("orchestrator.prot=1", "additional properties 'prot' not allowed"),
        ("orchestrator.port=0", "minimum"),
        ("orchestrator.mode=both", "value must be one of"),
        ("images.full.tag=latest", "'not' failed"),
        ("rollout.enabled=true", "/rollout/token/existingSecret"),
        ("agent.enabled=true", "/agent/token/existingSecret"),
        ("agent.enabled=true,agent.token.existingSecret=x,orchestrator.atOnce=2", "/orchestrator/atOnce"),
        ("ingress.enabled=true", "/ingress/tlsSecret"),
        ("orchestrator.shm=lots", "does not match pattern"),
    ],
)
def test_values_that_cannot_be_are_refused(setting: str, says: str) -> None:
    done = helm("template", "release", ".", "--set", setting)
    assert done.returncode != 0
    assert says in done.stderr


def test_the_schema_knows_exactly_the_values() -> None:
    def keys(schema: dict[str, Any]) -> Any:
        return {name: keys(inner) for name, inner in schema["properties"].items()} if "properties" in schema else None

    def shape(value: Any, schema: Any) -> Any:
        return {name: shape(inner, schema[name]) for name, inner in value.items()} if isinstance(schema, dict) else None

    known = keys(json.loads((CHART / "values.schema.json").read_text()))
    del known["global"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert shape(values, known) == known


def test_it_packages_and_the_package_holds_what_the_templates_read(tmp_path: Path) -> None:
    done = helm("package", ".", "-d", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("*.tgz")
    names = subprocess.run(["tar", "tzf", str(package)], capture_output=True, text=True, check=True).stdout
    assert "nightshift/files/rules.yaml" in names
    assert names.count("files/dashboards/") == len(list((CHART / "files/dashboards").iterdir()))


def test_state_survives_and_replicas_are_left_to_the_autoscaler() -> None:
    objects = rendered("values-prod.yaml")
    (claim,) = of_kind(objects, "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    server = server_of(objects)
    assert "replicas" not in server["spec"], "an upgrade would undo what the autoscaler chose"
    (scaled,) = of_kind(objects, "ScaledObject")
    assert scaled["spec"]["scaleTargetRef"]["name"] == server["metadata"]["name"]
    (orchestrator,) = of_kind(objects, "Deployment")
    assert orchestrator["spec"]["strategy"] == {"type": "Recreate"}


def test_the_production_values_use_64_gpus_at_most() -> None:
    objects = rendered("values-prod.yaml")
    (scaled,) = of_kind(objects, "ScaledObject")
    target = scaled["spec"]["scaleTargetRef"]
    server = f"{target['kind']}/{target['name']}/"
    gpus = 0
    for name, spec in pods(objects):
        replicas = scaled["spec"]["maxReplicaCount"] if name.startswith(server) else 1
        gpus += replicas * sum(int(one["resources"]["limits"].get("nvidia.com/gpu", 0)) for one in spec["containers"])
    assert gpus == 64


@pytest.mark.parametrize("values", ["values-gpu.yaml", "values-fleet.yaml", "values-prod.yaml", "values-kuberay.yaml"])
def test_a_pod_with_gpus_tolerates_their_nodes_taint(values: str) -> None:
    asking = [
        spec
        for _, spec in pods(rendered(values))
        if any("nvidia.com/gpu" in container["resources"]["limits"] for container in spec["containers"])
    ]
    assert asking
    for spec in asking:
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]


def test_pods_are_spread_ranked_and_kept_from_going_all_at_once() -> None:
    objects = rendered("values-prod.yaml")
    classes = {one["metadata"]["name"]: one["value"] for one in of_kind(objects, "PriorityClass")}
    for name, spec in pods(objects):
        if name.startswith("Pod/"):
            continue  # the chart's test
        assert spec["priorityClassName"] in classes, name
    server = server_of(objects)["spec"]["template"]["spec"]
    others = [spec for name, spec in pods(objects) if "rollout" not in name and not name.startswith("Pod/")]
    # What costs the least to lose goes first.
    assert all(classes[server["priorityClassName"]] < classes[spec["priorityClassName"]] for spec in others)
    assert server["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
    guarded = [one["spec"]["selector"]["matchLabels"] for one in of_kind(objects, "PodDisruptionBudget")]
    for one in (*of_kind(objects, "Deployment"), *of_kind(objects, "StatefulSet")):
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert any(selector.items() <= labels.items() for selector in guarded), one["metadata"]["name"]


@pytest.mark.parametrize("values", VALUES)
def test_its_notes_say_how_to_reach_and_to_test_it(values: str) -> None:
    files = [] if values == "values.yaml" else ["-f", values]
    done = helm("install", "night", ".", "--namespace", "train", "--dry-run=client", *files)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.split("NOTES:", 1)[1]
    assert "helm -n train test night" in notes
    assert "https://" in notes or "port-forward deploy/night-nightshift-orchestrator" in notes
    hooks = [one["metadata"].get("annotations", {}).get("helm.sh/hook") for one in rendered(values)]
    assert "test" in hooks


@pytest.mark.parametrize(("values", "place"), [("values-fleet.yaml", "orchestrator"), ("values-prod.yaml", "agent")])
def test_rollout_pods_fetch_weights_where_the_trainer_is_and_may(values: str, place: str) -> None:
    objects = rendered(values)
    server = server_of(objects)
    variables = {v["name"]: v.get("value") for v in server["spec"]["template"]["spec"]["containers"][0]["env"]}
    host, _, port = variables["NIGHTSHIFT_WEIGHT_URL"].removeprefix("http://").partition(":")
    assert host == f"release-nightshift-{place}"
    (service,) = [one for one in of_kind(objects, "Service") if one["metadata"]["name"] == host]
    (weights,) = [one for one in service["spec"]["ports"] if one["port"] == int(port)]
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "NetworkPolicy")}
    rules = [
        rule for rule in policies[host]["ingress"] for one in rule["ports"] if one["port"] == weights["targetPort"]
    ]
    (rule,) = rules
    labels = rule["from"][0]["podSelector"]["matchLabels"]
    assert labels.items() <= server["spec"]["template"]["metadata"]["labels"].items()


def test_a_remote_orchestrator_knows_where_its_jobs_roles_are() -> None:
    objects = rendered("values-prod.yaml")
    (orchestrator,) = of_kind(objects, "Deployment")
    variables = {v["name"]: v for v in orchestrator["spec"]["template"]["spec"]["containers"][0]["env"]}
    job = JobSpec.model_validate(
        {
            "name": "x",
            "model": {"path": "/models/policy"},
            "data": {"train_files": ["x"]},
            "rewards": [{"function": "x.py:f"}],
        }
    )
    spec = with_site(job, {name: variable["value"] for name, variable in variables.items() if "value" in variable})
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "Service")}
    for url in (spec.resources.agents.trainer, spec.resources.agents.scorers):
        host, _, port = str(url).removeprefix("http://").partition(":")
        assert int(port) in [one["port"] for one in services[host]["ports"]]
    server = server_of(objects)["metadata"]["name"]
    assert [urlsplit(url).hostname for url in spec.rollout.urls] == [f"{server}-{at}.{server}" for at in range(4)]
    (agent,) = [one for one in of_kind(objects, "StatefulSet") if one["metadata"]["name"].endswith("-agent")]
    container = agent["spec"]["template"]["spec"]["containers"][0]
    told = variables["NIGHTSHIFT_AGENT_TOKEN"]["valueFrom"]
    assert told in [variable.get("valueFrom") for variable in container["env"]], "both have the same token"
    assert f"--host={agent['metadata']['name']}" in container["args"], "its Service leads to it under the name it gives"


def test_an_embedded_orchestrator_knows_its_rollout_pods_and_where_they_fetch_weights() -> None:
    objects = rendered("values-fleet.yaml")
    (orchestrator,) = of_kind(objects, "Deployment")
    container = orchestrator["spec"]["template"]["spec"]["containers"][0]
    told = {v["name"]: v["value"] for v in container["env"] if "value" in v}
    job = {"name": "x", "model": {"path": "/m"}, "data": {"train_files": ["x"]}, "rewards": [{"function": "x.py:f"}]}
    spec = with_site(JobSpec.model_validate(job), told)
    assert len(spec.rollout.urls) == 4
    assert weight_transfer(spec, "cuda") == "http"
    fetched = {
        v["name"]: v.get("value") for v in server_of(objects)["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    port = spec.resources.ports.weights
    assert fetched["NIGHTSHIFT_WEIGHT_URL"] == f"http://{spec.resources.weight_host}:{port}"
    assert port in [one["containerPort"] for one in container["ports"]]


def test_scorers_are_scaled_by_serve_alone() -> None:
    """KEDA on the pods of a RayService would work against Serve and Ray, which choose replicas and nodes themselves."""
    objects = rendered("values-kuberay.yaml")
    (service,) = of_kind(objects, "RayService")
    applications = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    for application in applications:
        (deployment,) = application["deployments"]
        assert DeploymentSchema.model_validate(deployment).autoscaling_config["max_replicas"] == 4
        assert deployment["name"] == application["import_path"].rpartition(":")[2]
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"] is True
    (workers,) = cluster["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (2, 6)
    targets = [one["spec"]["scaleTargetRef"]["kind"] for one in of_kind(objects, "ScaledObject")]
    assert not targets or set(targets) <= {"StatefulSet", "LeaderWorkerSet"}


def test_an_ingress_has_tls_for_each_of_its_hosts_and_leads_to_the_orchestrator() -> None:
    objects = rendered("values-prod.yaml")
    (ingress,) = of_kind(objects, "Ingress")
    covered = {host for entry in ingress["spec"]["tls"] for host in entry["hosts"] if entry["secretName"]}
    assert {rule["host"] for rule in ingress["spec"]["rules"]} == covered
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "Service")}
    for rule in ingress["spec"]["rules"]:
        for path in rule["http"]["paths"]:
            target = path["backend"]["service"]
            assert target["port"]["name"] in [port["name"] for port in services[target["name"]]["ports"]]


@pytest.mark.parametrize("values", VALUES)
def test_the_charts_own_test_asks_whether_the_service_is_ready(values: str) -> None:
    objects = rendered(values)
    (pod,) = of_kind(objects, "Pod")
    url = urlsplit(pod["spec"]["containers"][0]["command"][-1])
    (service,) = [one for one in of_kind(objects, "Service") if one["metadata"]["name"] == url.hostname]
    assert (url.path, url.port in [port["port"] for port in service["spec"]["ports"]]) == ("/readyz", True)


def test_rollouts_are_scaled_by_what_waits_for_them() -> None:
    objects = rendered("values-prod.yaml")
    (scaled,) = of_kind(objects, "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["type"] == "prometheus"
    assert unknown_names(trigger["metadata"]["query"]) == set(), "the query reads metrics that exist"
