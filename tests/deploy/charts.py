"""The chart rendered by the real helm, and its objects checked against the real schemas."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/nightshift"
VALUES = tuple(sorted(path.name for path in CHART.glob("values*.yaml")))
VERSIONS = ("1.28", "1.29", "1.30", "1.31", "1.32", "1.33", "1.34")
HOW = "see docs/deployment.md, Test the deployment"
#: Kinds that helm's own schemas do not know -> where their schemas are from.
CRDS = {
    "RayCluster": "ray.io_rayclusters.yaml",
    "RayService": "ray.io_rayservices.yaml",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io_leaderworkersets.yaml",
}
MODELS = {
    "ServiceMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
    "PodMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
    "ScaledObject": "@kubernetes-models/keda/keda.sh/v1alpha1",
}


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs helm in the chart's folder."""
    program = shutil.which("helm")
    assert program, f"helm is not installed: {HOW}"
    return subprocess.run([program, *arguments], cwd=CHART, capture_output=True, text=True, timeout=300)


@cache
def rendered(values: str, version: str = "1.31", settings: tuple[str, ...] = ()) -> tuple[dict[str, Any], ...]:
    """All objects of the chart with a values file; tests must not change them."""
    files = [] if values == "values.yaml" else ["-f", values]
    more = [part for setting in settings for part in ("--set", setting)]
    done = helm("template", "release", ".", "--namespace", "train", "--kube-version", f"{version}.0", *files, *more)
    assert done.returncode == 0, done.stderr
    return tuple(document for document in yaml.safe_load_all(done.stdout) if document)


def of_kind(objects: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The objects of a kind."""
    return [one for one in objects if one["kind"] == kind]


def pods(objects: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, pod specification) of every pod that the objects would make, those of Ray included."""
    for one in objects:
        name = f"{one['kind']}/{one['metadata']['name']}"
        if one["kind"] == "Pod":
            yield name, one["spec"]
        for path, value in _walk(one.get("spec", {})):
            if path and path[-1].lower().endswith("template") and isinstance(value, dict) and "spec" in value:
                yield f"{name}/{'/'.join(path[:-1])}", value["spec"]


def _walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _walk(item, (*path, str(key)))


def check(document: dict[str, Any], version: str) -> None:
    """Checks one object strictly: unknown keys and unknown kinds are errors.

    Raises:
        AssertionError: says what is wrong, or that nothing knows the kind.
    """
    kind = document["kind"]
    if kind in CRDS:
        problems = [f"{'/'.join(map(str, e.path))}: {e.message}" for e in _crd_schema(kind).iter_errors(document)]
    elif kind in MODELS:
        problems = _model_problems(document)
    else:
        problems = _kubernetes_problems(document, version)
    assert not problems, f"{kind} {document['metadata']['name']}: {problems}"


def _kubernetes_problems(document: dict[str, Any], version: str) -> list[str]:
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'/'.join(map(str, error.path))}: {error.message}"]
    except kubernetes_validate.SchemaNotFoundError as error:
        return [f"no schema knows it: {error}"]
    return []


@cache
def _crd_schema(kind: str) -> jsonschema.Draft7Validator:
    folder = os.environ.get("NIGHTSHIFT_CRDS")
    assert folder, f"NIGHTSHIFT_CRDS names no folder with the CRDs of KubeRay and LeaderWorkerSet: {HOW}"
    with (Path(folder) / CRDS[kind]).open() as file:
        crd = yaml.load(file, Loader=yaml.CSafeLoader)
    (version,) = (one for one in crd["spec"]["versions"] if one["name"] == "v1")
    return jsonschema.Draft7Validator(_strict(version["schema"]["openAPIV3Schema"], top=True))


def _strict(schema: Any, *, top: bool = False) -> Any:
    """A CRD's schema as JSON schema in which what it does not name is an error, as the API server prunes it."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items() if key not in ("description", "default", "format")}
    if isinstance(schema.get("properties"), dict):
        made["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        keeps = schema.get("x-kubernetes-preserve-unknown-fields")
        if not keeps and "additionalProperties" not in schema:
            made["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        made = {"type": ["integer", "string"]}
    if top:
        made["properties"]["metadata"] = {"type": "object"}
    return made


def _model_problems(document: dict[str, Any]) -> list[str]:
    folder, node = os.environ.get("NIGHTSHIFT_NODE_MODULES"), shutil.which("node")
    assert node, f"node is not installed: {HOW}"
    assert folder, f"NIGHTSHIFT_NODE_MODULES names no folder with @kubernetes-models: {HOW}"
    script = (
        "const [place, kind] = process.argv.slice(1);"
        "const module = await import(place);"
        "const text = (await import('node:fs')).readFileSync(0, 'utf8');"
        "try { new module[kind](JSON.parse(text)).validate() }"
        "catch (error) { console.log(error.message) }"
    )
    kind = document["kind"]
    stem = Path(folder) / MODELS[kind] / kind
    place = next(path for suffix in (".mjs", ".js") if (path := stem.with_suffix(suffix)).exists())
    done = subprocess.run(
        [node, "--input-type=module", "-e", script, place.as_uri(), kind],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line]
