"""What a request says and no route reads is refused, and what is wrong with a value is said in full sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.service import Api, job, serve

FLEET = '{"servers": [{"name": "a", "url": "http://h"}]'
#: method, path, content, status, and what the problem says.
CASES = [
    ("GET", "/v1/jobs?stat=running", None, 422, "there is no parameter 'stat': did you mean 'state'?"),
    ("GET", "/v1/fleets?x=1", None, 422, "there is no parameter 'x': there are none here"),
    ("POST", "/v1/jobs?priorty=3", b"{}", 422, "did you mean 'priority'?"),
    ("GET", "/v1/jobs?limit=0", None, 422, "limit is '0', but must be greater than or equal to 1"),
    ("GET", "/v1/jobs?limit=many", None, 422, "limit is 'many', but must be a whole number"),
    ("GET", "/v1/jobs?state=run", None, 422, "is 'run', but must be 'queued', 'starting'"),
    ("GET", "/v1/traces/zz", None, 422, "trace_id is 'zz', but must match ^[0-9a-f]{8,32}$"),
    ("PUT", "/v1/fleets/n", FLEET + ', "hold_s": 1, "hold_s": 2}', 422, "the key 'hold_s' stands twice in one map"),
    ("PUT", "/v1/fleets/n", FLEET + ', "hold_s": NaN}', 422, "NaN is no number that JSON knows"),
    ("PUT", "/v1/fleets/n", FLEET + ', "hold_s": -1}', 422, "hold_s is -1, but must be greater than or equal to 0"),
    ("PUT", "/v1/fleets/n", FLEET + ', "holds": 1}', 422, "holds is not known here"),
    ("PUT", "/v1/fleets/n", "[]", 422, "the body is [], but must be a map"),
    ("PUT", "/v1/fleets/n", "{}", 422, "servers is missing"),
    ("PUT", "/v1/fleets/n", FLEET, 400, "the body is not valid JSON"),
    ("POST", "/v1/tokens", '{"name": "t", "scopes": []}', 422, "scopes is [], but must hold at least 1"),
    ("PATCH", "/v1/jobs/JOB/settings", '{"gamma": 0.5, "gamma": 1}', 422, "the key 'gamma' stands twice"),
    ("PATCH", "/v1/jobs/JOB/settings", "{}", 422, "must hold at least 1"),
    ("PATCH", "/v1/jobs/JOB/settings", '"x"', 422, "the body is 'x', but must be a map"),
]


async def ask(api: Api, method: str, path: str, content: Any) -> Any:
    headers = {"Content-Type": "application/json"} if content is not None else {}
    return await api.http.request(method, path, content=content, headers=headers)


async def test_each_refusal_says_what_is_wrong_and_what_is_right(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        made = await api.submit(job())
        for method, path, content, status, part in CASES:
            answer = await ask(api, method, path.replace("JOB", made["id"]), content)
            assert answer.status_code == status, (path, content, answer.text)
            problem = answer.json()
            assert part in problem["detail"], (path, content, problem)
            assert "Input should" not in answer.text
        assert (await api.http.get("/v1/fleets")).json() == {"fleets": []}
        assert (await api.http.get(f"/v1/jobs/{made['id']}/settings")).json()["pending"] == {}


async def test_what_a_path_takes_is_named_whole(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        for path, methods in {"/v1/jobs": "GET, POST", "/v1/fleets/n": "DELETE, GET, PUT", "/healthz": "GET"}.items():
            answer = await api.http.request("TRACE", path)
            assert (answer.status_code, answer.headers["allow"]) == (405, methods)


async def test_every_route_of_the_api_is_strict(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        paths = (await api.http.get("/openapi.json")).json()["paths"]
        for path, operations in paths.items():
            if not path.startswith("/v1/"):
                continue
            for method in operations:
                filled = path.replace("{step}", "1").replace("{number}", "1").replace("{trace_id}", "0" * 32)
                for name in ("job_id", "sha256", "role", "name", "token_id"):
                    filled = filled.replace("{" + name + "}", "0" * 64 if name == "sha256" else "x")
                answer = await ask(api, method.upper(), f"{filled}?no_such_parameter=1", None)
                assert answer.status_code == 422, (method, path, answer.text)
                assert "no_such_parameter" in json.dumps(answer.json()["errors"]), (method, path)


@pytest.mark.parametrize("body", [b"\xff", b"[" * 100_000, b'{"a": 1e999}'])
async def test_hostile_json_is_a_refusal(tmp_path: Path, body: bytes) -> None:
    async with serve(tmp_path, drive=False) as api:
        answer = await ask(api, "PUT", "/v1/fleets/n", body)
        assert answer.status_code in (400, 422), answer.text
