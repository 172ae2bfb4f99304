"""Who may do what, and what the service refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.store.access import Scope
from tests.fakes.service import REWARD, ROWS, digest, job, serve


def problem(response: Any, status: int) -> dict[str, Any]:
    """The problem of a refusal, checked against RFC 9457."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    found = response.json()
    assert found["status"] == status
    assert found["title"]
    assert found["detail"]
    assert found["type"].startswith("urn:nightshift:problem:")
    return dict(found)


async def test_tokens_that_are_missing_wrong_expired_or_revoked(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        made = await api.submit()
        paths = ["/v1/jobs", f"/v1/jobs/{made['id']}", "/v1/tokens", f"/v1/jobs/{made['id']}/events"]
        expired = api.token(Scope.ADMIN, expires=1.0)
        token, text = api.service.access.create_token("t", [Scope.ADMIN])
        api.service.access.revoke_token(token.id)
        for headers in (
            {"Authorization": ""},
            {"Authorization": "Basic eDp5"},
            {"Authorization": "Bearer ns_0_wrong"},
            {"Authorization": f"Bearer {text}"},
            {"Authorization": b"Bearer \xc3\xa9"},
            expired,
        ):
            for path in paths:
                response = await api.http.get(path, headers=headers)
                problem(response, 401)
                assert response.headers["www-authenticate"].startswith("Bearer")
        assert (await api.http.get("/healthz", headers={"Authorization": ""})).status_code == 200


async def test_scopes(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        made = await api.submit()
        read, submit = api.token(Scope.READ), api.token(Scope.SUBMIT)
        path = f"/v1/jobs/{made['id']}"
        assert (await api.http.get(path, headers=read)).status_code == 200
        assert (await api.http.get(path, headers=submit)).status_code == 200
        problem(await api.http.post(f"{path}/cancel", headers=read), 403)
        problem(await api.http.post("/v1/jobs", json=job(), headers=read), 403)
        problem(await api.http.put(f"/v1/uploads/{digest(ROWS)}", content=ROWS, headers=read), 403)
        for method, where in (("GET", "/v1/tokens"), ("GET", "/v1/audit"), ("PUT", "/v1/projects/x")):
            problem(await api.http.request(method, where, headers=submit, json={}), 403)
        assert (await api.http.post(f"{path}/cancel", headers=submit)).status_code == 200


async def test_who_may_bring_code_is_a_scope(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        without, with_code = api.token(Scope.SUBMIT), api.token(Scope.SUBMIT, Scope.CODE)
        refused = problem(await api.http.post("/v1/jobs", json=job(), headers=without), 403)
        assert "rewards[0].function" in refused["detail"]
        remote = job(rewards=[{"type": "grpc", "url": "grpc://scorer:1", "name": "r"}])
        assert (await api.http.post("/v1/jobs", json=remote, headers=without)).status_code == 201
        sneaky = remote | {"rollout": {"extra_args": ["--middleware", "x"]}}
        problem(await api.http.post("/v1/jobs", json=sneaky, headers=without), 403)
        ordered = remote | {"data": remote["data"] | {"curriculum": f"upload:{digest(REWARD)}/order.py:score"}}
        refused = problem(await api.http.post("/v1/jobs", json=ordered, headers=without), 403)
        assert "data.curriculum" in refused["detail"]
        for section, name in (("data", "curriculum"), ("algorithm", "policy_loss"), ("algorithm", "estimator")):
            installed = remote | {section: remote[section] | {name: "subprocess.call"}}
            refused = problem(await api.http.post("/v1/jobs", json=installed, headers=without), 403)
            assert f"{section}.{name}" in refused["detail"]
        judge = {"type": "judge", "url": "http://evil.example", "model": "m"}
        for reward in ({"type": "code"}, judge | {"api_key_variable": "NIGHTSHIFT_TOKEN"}):
            problem(await api.http.post("/v1/jobs", json=job(rewards=[reward]), headers=without), 403)
        judged = await api.http.post("/v1/jobs", json=job(rewards=[judge]), headers=without)
        assert judged.status_code == 201, judged.text
        assert (await api.http.post("/v1/jobs", json=job(), headers=with_code)).status_code == 201


async def test_another_projects_job_is_not_there(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        await api.http.put("/v1/projects/other", json={})
        made = await api.submit()
        other = api.token(Scope.SUBMIT, Scope.CODE, project="other")
        base = f"/v1/jobs/{made['id']}"
        reads = ["", "/events", "/metrics-history", "/rollouts", "/ledger", "/checkpoints", "/logs", "/report"]
        for path in reads:
            problem(await api.http.get(base + path, headers=other), 404)
        for call in ("pause", "resume", "cancel"):
            problem(await api.http.post(f"{base}/{call}", headers=other), 404)
        problem(await api.http.delete(base, headers=other), 404)
        assert (await api.http.get("/v1/jobs", headers=other)).json()["jobs"] == []
        assert (await api.http.get("/v1/jobs", params={"project": "default"}, headers=other)).json()["jobs"] == []
        problem(await api.http.post("/v1/jobs", params={"project": "default"}, json=job(), headers=other), 404)
        # Uploads are a project's own, so that a hash does not tell what others have.
        problem(await api.http.get(f"/v1/uploads/{digest(REWARD)}", headers=other), 404)
        problem(await api.http.post("/v1/jobs", json=job(), headers=other), 422)


async def test_tokens_through_the_api(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        body = {"name": "ci", "scopes": ["read"], "project": "default", "ttl_s": 60}
        made = (await api.http.post("/v1/tokens", json=body)).json()
        headers = {"Authorization": f"Bearer {made['token']}"}
        assert (await api.http.get("/v1/jobs", headers=headers)).status_code == 200
        listed = (await api.http.get("/v1/tokens")).json()["tokens"]
        assert made["token"] not in json.dumps(listed)
        assert (await api.http.delete(f"/v1/tokens/{made['id']}")).status_code == 204
        problem(await api.http.get("/v1/jobs", headers=headers), 401)
        problem(await api.http.delete("/v1/tokens/nosuch"), 404)
        problem(await api.http.post("/v1/tokens", json=body | {"project": "nosuch"}), 404)
        wrong = problem(await api.http.post("/v1/tokens", json=body | {"scopes": ["root"]}), 422)
        assert wrong["errors"][0]["field"] == "scopes.0"
        actions = [entry["action"] for entry in (await api.http.get("/v1/audit")).json()["entries"]]
        assert actions[:2] == ["token.revoke", "token.make"]


BOMB = b"a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n"


@pytest.mark.parametrize(
    ("body", "kind", "status", "says"),
    [
        (b"", "json", 400, "not valid JSON"),
        (b"[1]", "json", 422, "a list"),
        (b"null", "json", 422, "empty"),
        (b'{"name": "a", "name": "b"}', "json", 422, "'name' stands twice"),
        (b'{"name": NaN}', "json", 400, "NaN"),
        (b"[" * 5000, "json", 422, "nested too deeply"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "json", 422, "deeper"),
        (b"\xff\xfe", "json", 400, "UTF-8"),
        (b"\xff\xfe", "yaml", 400, "UTF-8"),
        (b"name: [", "yaml", 400, "not valid YAML"),
        (b"name: a\nname: b", "yaml", 422, "line 2: the key 'name' stands twice"),
        (BOMB, "yaml", 422, "aliases"),
        (b"name: !!python/object/apply:os.system [id]", "yaml", 422, "tags"),
        (b"? [a]\n: b", "yaml", 422, "a key must be a name"),
        (b"[" * 3000, "yaml", 422, "deeper"),
        (b"- a\n" * 30000, "yaml", 422, "larger"),
        (b"name: x\nname2: 2001-99-99", "yaml", 400, "not valid YAML"),
        (b"name: ${oc.env:HOME}", "yaml", 422, "interpolation"),
        (b"name: a${name}", "yaml", 422, "interpolation"),
        (b"name: ${nosuch.key}", "yaml", 422, "refers to nothing"),
    ],
)
async def test_documents_that_are_none(tmp_path: Path, body: bytes, kind: str, status: int, says: str) -> None:
    async with serve(tmp_path, drive=False) as api:
        response = await api.http.post("/v1/jobs", content=body, headers={"content-type": f"application/{kind}"})
        assert says in problem(response, status)["detail"]
        assert not list((tmp_path / "runs").iterdir())


async def test_a_document_may_be_yaml_and_refer_to_its_own_values(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        document = job(rollout={"batch_size": 6, "n": "${rollout.batch_size}"})
        headers = {"content-type": "application/yaml"}
        made = await api.http.post("/v1/jobs", content=yaml.safe_dump(document), headers=headers)
        assert made.json()["spec"]["rollout"]["n"] == 6
        problem(await api.http.post("/v1/jobs", content="x", headers={"content-type": "text/plain"}), 415)


async def test_every_wrong_field_is_named(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        wrong = job(trainer={"learning_rat": 1, "total_steps": "many"}, rollout={"n": -1})
        found = problem(await api.http.post("/v1/jobs", json=wrong), 422)
        assert {item["field"] for item in found["errors"]} == {
            "trainer.learning_rat",
            "trainer.total_steps",
            "rollout.n",
        }
        assert any("learning_rate" in item["message"] for item in found["errors"])


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", ".", "", "x" * 300, "a\x00b", "a..b"])
async def test_o48_job_names_that_are_paths(tmp_path: Path, name: str) -> None:
    async with serve(tmp_path / "data", drive=False) as api:
        problem(await api.http.post("/v1/jobs", json=job(name)), 422)
        assert not list((tmp_path / "data" / "runs").iterdir())
        assert os.listdir(tmp_path) == ["data"]  # noqa: PTH208


@pytest.mark.parametrize(
    "job_id", ["..", ".", "%2e%2e", "a%2fb", "..%2f..%2fetc%2fpasswd", "x" * 300, "no-such", "a%00b"]
)
async def test_o48_ids_that_are_paths_or_not_there(tmp_path: Path, job_id: str) -> None:
    async with serve(tmp_path, drive=False) as api:
        for tail in ("", "/logs", "/checkpoints"):
            response = await api.http.get(f"/v1/jobs/{job_id}{tail}", follow_redirects=False)
            assert response.status_code in (404, 405, 422, 200, 307), response.text
            if response.status_code == 200:  # the path was taken together to the list of jobs
                assert "jobs" in response.json()


async def test_o48_files_of_the_server_cannot_be_named(tmp_path: Path) -> None:
    outside = tmp_path / "secret.jsonl"
    outside.write_bytes(ROWS)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "rows.jsonl").write_bytes(ROWS)
    (shared / "link.jsonl").symlink_to(outside)
    async with serve(tmp_path / "data", drive=False, allowed=[shared]) as api:
        for path in (str(outside), "/etc/passwd", "../rows.jsonl", "rows.jsonl", f"{shared}/../secret.jsonl", "~/x",
                     f"{shared}/link.jsonl", "file:///etc/passwd"):  # fmt: skip
            found = problem(await api.http.post("/v1/jobs", json=job(data={"train_files": [path]})), 422)
            assert found["errors"][0]["field"] == "data.train_files[0]", path
        for section in (
            {"model": {"path": "/etc"}},
            {"model": {"path": "x", "tokenizer": "/etc"}},
            {"rewards": [{"type": "classifier", "model": "/etc"}]},
            {"scorers": {"critic": {"model": "/etc"}}},
            {"scorers": {"teacher": {"model": "../etc"}}},
            {"tracking": {"mlflow": "sqlite:////etc/x.db"}},
            {"rewards": [{"function": "/etc/x.py:f"}]},
            {"algorithm": {"estimator": "/etc/x.py:f"}},
        ):
            problem(await api.http.post("/v1/jobs", json=job() | section), 422)
        assert (
            await api.http.post("/v1/jobs", json=job(data={"train_files": [f"{shared}/rows.jsonl"]}))
        ).status_code == 201


async def test_uploads(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False, max_upload=1000, max_project_uploads=1500) as api:
        data = b"x" * 900
        path = f"/v1/uploads/{digest(data)}"
        assert (await api.http.get(path)).status_code == 404
        assert (await api.http.put(path, content=data)).status_code == 201
        assert (await api.http.put(path, content=data)).status_code == 200
        assert (await api.http.get(path)).json()["bytes"] == 900
        assert "the SHA-256" in problem(await api.http.put(path, content=b"other"), 422)["detail"]
        assert (await api.http.get(path)).json()["bytes"] == 900, "a wrong upload spoils nothing"
        big = b"y" * 1001
        problem(await api.http.put(f"/v1/uploads/{digest(big)}", content=big), 413)

        async def unannounced():  # no Content-Length
            for _ in range(4):
                yield b"y" * 300

        problem(await api.http.put(f"/v1/uploads/{digest(b'y' * 1200)}", content=unannounced()), 413)
        full = b"z" * 800
        assert "full" in problem(await api.http.put(f"/v1/uploads/{digest(full)}", content=full), 413)["detail"]
        problem(await api.http.put("/v1/uploads/../../x", content=b"x"), 404)
        problem(await api.http.put(f"/v1/uploads/{'G' * 64}", content=b"x"), 422)
        assert not list((tmp_path / "uploads").rglob(".*")), "nothing half-written is left"
        missing = job(data={"train_files": [f"upload:{'0' * 64}/rows.jsonl"]})
        assert "not there" in problem(await api.http.post("/v1/jobs", json=missing), 422)["detail"]
        for name in ("../x", "a/b", ".x", ""):
            wrong = job(data={"train_files": [f"upload:{digest(ROWS)}/{name}"]})
            problem(await api.http.post("/v1/jobs", json=wrong), 422)
        broken = job(rewards=[{"function": f"upload:{digest(ROWS)}/reward.py:score"}])
        problem(await api.http.post("/v1/jobs", json=broken), 422)
        assert not list((tmp_path / "runs").iterdir())


async def test_bodies_that_are_too_large(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False, max_body=1000) as api:
        problem(await api.http.post("/v1/jobs", content=b"x" * 1001), 413)

        async def unannounced():
            for _ in range(4):
                yield b"x" * 300

        problem(await api.http.post("/v1/jobs", content=unannounced()), 413)
        problem(await api.http.post("/v1/tokens", content=unannounced()), 413)


async def test_rates(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False, requests_per_s=0.01, burst=6) as api:
        answers = [await api.http.get("/v1/jobs") for _ in range(6)]
        last = answers[-1]
        problem(last, 429)
        assert int(last.headers["retry-after"]) >= 1
        assert (await api.http.get("/v1/jobs", headers=api.token(Scope.READ))).status_code == 200
        assert (await api.http.get("/healthz")).status_code == 200


async def test_without_tokens_only_loopback_names_and_the_own_origin_are_served(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False, require_token=False) as api:
        assert (await api.http.get("/v1/jobs")).status_code == 200
        assert (await api.http.get("/v1/jobs", headers={"host": "localhost:8080"})).status_code == 200
        problem(await api.http.get("/v1/jobs", headers={"host": "evil.example"}), 403)
        problem(await api.http.post("/v1/jobs", json=job(), headers={"origin": "http://evil.example"}), 403)
        assert (await api.http.get("/v1/jobs", headers={"origin": "http://127.0.0.1"})).status_code == 200


async def test_no_other_origin_is_allowed(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
        preflight = await api.http.options("/v1/jobs", headers=asked)
        assert "access-control-allow-origin" not in preflight.headers
        answer = await api.http.get("/v1/jobs", headers={"origin": "http://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


async def test_paths_and_methods_that_are_none(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        problem(await api.http.get("/v1/nothing"), 404)
        problem(await api.http.patch("/v1/jobs"), 405)
        problem(await api.http.get("/v1/jobs", params={"limit": "many"}), 422)
        problem(await api.http.get("/v1/jobs", params={"state": "nosuch"}), 422)
        problem(await api.http.get("/v1/traces/xyz"), 422)


async def test_a_key_that_was_used_for_another_job(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        headers = {"Idempotency-Key": "k"}
        first = await api.submit(headers=headers)
        again = await api.http.post("/v1/jobs", json=job(), headers=headers)
        assert (again.status_code, again.json()["id"]) == (200, first["id"])
        found = problem(await api.http.post("/v1/jobs", json=job("other"), headers=headers), 422)
        assert found["type"].endswith("idempotency-key-reused")


async def test_prometheus_reads_states(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        await api.submit()
        text = (await api.http.get("/metrics")).text
        assert 'nightshift_jobs{state="queued"} 1.0' in text
        assert 'nightshift_api_requests_total{method="POST",route="/v1/jobs",status="201"} 1.0' in text


async def test_an_error_that_was_not_foreseen_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(tmp_path, drive=False) as api:

        def broken(*_values: object, **_more: object) -> None:
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr(api.service.jobs, "find", broken)
        found = problem(await api.http.get("/v1/jobs"), 500)
        assert "a fault of ours" not in found["detail"], "the log has it"
        text = (await api.http.get("/metrics")).text
        assert 'nightshift_api_requests_total{method="GET",route="/v1/jobs",status="500"} 1.0' in text
