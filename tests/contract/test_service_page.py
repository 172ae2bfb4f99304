"""The page as it is served: its files, its policy, and no word of another host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.api import routes_page
from tests.fakes.service import serve

FOLDER = Path(routes_page.__file__).parent / "page"
FILES = sorted(path.name for path in FOLDER.iterdir())


async def test_the_page_and_its_parts_need_no_token(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        answer = await api.http.get("/", headers={"Authorization": ""})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        parts = re.findall(r'(?:href|src)="(/page/[^"]+)"', answer.text)
        imported = [
            name
            for file in FILES
            if file.endswith(".js")
            for name in re.findall(r'from "([^"]+)"', (FOLDER / file).read_text())
        ]
        for part in {*parts, *imported}:
            found = await api.http.get(part, headers={"Authorization": ""})
            assert found.status_code == 200, part
            assert found.text == (FOLDER / part.rpartition("/")[2]).read_text()
        assert {part.rpartition("/")[2] for part in (*parts, *imported)} == set(FILES) - {"index.html"}
        for name in ("index.html", "..", "%2e%2e%2fapp.py", "routes_page.py"):
            assert (await api.http.get(f"/page/{name}")).status_code in (200, 404, 422)
            assert "def " not in (await api.http.get(f"/page/{name}")).text


@pytest.mark.parametrize("name", FILES)
def test_no_part_asks_another_host_or_makes_markup_of_text(name: str) -> None:
    text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in text
    assert "https://" not in text
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in text
