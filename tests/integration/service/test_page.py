"""The page in a real Chromium: each view with a live job, by mouse and by keyboard, in both colours and on a phone."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nightshift.config.load import load_job
from nightshift.wire.lease_file import Released, write_released
from tests.contract.test_service_process import write_job
from tests.fakes.service import job
from tests.fakes.shared_servers import SharedServers
from tests.fakes.up import Up

pytestmark = pytest.mark.integration
playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need Playwright and Chromium")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHOTS = Path(os.environ.get("NIGHTSHIFT_SCREENSHOTS") or "artifacts/screenshots")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("page") / "data", "--at-once", "3") as running:
        yield running


@pytest.fixture(scope="module")
def live(up: Up, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job that goes on through all tests."""
    spec = load_job(write_job(tmp_path_factory.mktemp("mine"), "live", steps=4000, step_s=0.2), check_files=False)
    with up.client() as client:
        made = client.submit(spec)
        deadline = time.monotonic() + 60
        while client.get(made.id).step < 5:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    return made.id


@pytest.fixture(scope="module")
def fleet(up: Up, live: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two jobs of weights 1 and 3 that hold a server each of a fleet, of which a third one does not answer."""
    folder = tmp_path_factory.mktemp("fleet")
    away = {"name": "away", "url": "http://127.0.0.1:9"}
    with SharedServers(folder / "logs", 2) as shared, up.client() as client:
        client.put_fleet("night", [*shared.servers, away], hold_s=3600.0)
        ids = []
        for name, weight in (("light", 1.0), ("heavy", 3.0)):
            rollout = {"fleet": {"name": "night", "weight": weight, "max_servers": 1}, "request_timeout_s": 0.2}
            spec = load_job(write_job(folder / name, name, steps=4000, rollout=rollout), check_files=False)
            ids.append(client.submit(spec).id)
        deadline = time.monotonic() + 60
        for job_id in ids:
            while client.get(job_id).state != "running":
                assert time.monotonic() < deadline, client.get(job_id)
                time.sleep(0.2)
            write_released(up.folder / "runs" / job_id, Released(wants=True))  # as a runner asks for servers
        while sum(server["lent"] for server in client.fleets()[0]["servers"]) < 2:
            assert time.monotonic() < deadline, client.fleets()
            time.sleep(0.2)
        yield ids


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture(params=["light", "dark", "phone"])
def page(browser: Any, up: Up, request: pytest.FixtureRequest) -> Iterator[Any]:
    size = {"width": 390, "height": 844} if request.param == "phone" else {"width": 1280, "height": 900}
    scheme = "dark" if request.param == "dark" else "light"
    context = browser.new_context(viewport=size, color_scheme=scheme)
    opened = context.new_page()
    problems: list[str] = []
    hosts: set[str] = set()
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("request", lambda asked: hosts.add(asked.url.split("/")[2] if "//" in asked.url else "data"))
    token = (up.folder / "admin-token").read_text().strip()
    opened.add_init_script(f"sessionStorage.setItem('nightshift-token', '{token}')")
    opened.variant = request.param
    yield opened
    assert problems == []
    assert hosts <= {up.url.split("/")[2], "data"}, "no request goes to another host"
    context.close()


def shot(page: Any, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SHOTS / f"{name}-{page.variant}.png"), full_page=True)


def fits(page: Any) -> None:
    """Nothing is wider than the window."""
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")


def test_every_view_of_a_live_job(page: Any, up: Up, live: str) -> None:
    page.goto(f"{up.url}/")
    page.get_by_role("link", name=live).wait_for()
    fits(page)
    shot(page, "jobs")
    page.get_by_role("link", name=live).click()
    page.locator("figure svg polyline").first.wait_for()
    before = page.locator("figure").first.inner_text()
    page.wait_for_function(
        "before => document.querySelector('figure').innerText !== before", arg=before, timeout=60_000
    )
    fits(page)
    shot(page, "overview")
    expected = {
        "lanes": "rect.span",
        "rollouts": "details summary",
        "settings": "input[aria-label='trainer.learning_rate']",
        "events": "tbody tr",
        "logs": "pre",
        "ledger": "p.succeeded",
        "checkpoints": ".hint",
        "report": "section h2",
        "plan": "section h2",
    }
    for name, selector in expected.items():
        page.get_by_role("navigation").get_by_role("link", name=name).click()
        page.locator(f"main {selector}").first.wait_for(timeout=60_000)
        fits(page)
        shot(page, name)


def test_the_report_of_a_live_job_says_what_its_steps_took(page: Any, up: Up, live: str) -> None:
    page.goto(f"{up.url}/#/job/{live}")
    page.locator("figure").first.wait_for()
    page.keyboard.press("9")
    page.get_by_role("heading", name="Steps").wait_for()
    page.get_by_text("asynchronous, max_staleness 1").wait_for()
    with up.client() as client:
        made = client.report(live)["steps"]["made"]
    for heading in ("Stages, medians", "Predicted and measured", "Who was busy", "Staleness and slots"):
        page.get_by_role("heading", name=heading).wait_for()
    row = page.get_by_role("row", name="generation")
    assert "0.12 s" in row.inner_text(), "six tenths of the steps of the process that plays the job"
    deadline = time.monotonic() + 60
    with up.client() as client:
        while client.report(live)["steps"]["made"] <= made:
            assert time.monotonic() < deadline, "no further step"
    page.get_by_role("button", name="Draw up again").focus()
    page.keyboard.press("Enter")
    page.wait_for_function(
        "made => Number(/([0-9]+) made/.exec(document.querySelector('main section p').innerText)[1]) > made", arg=made
    )
    fits(page)


def test_the_plan_of_a_job_and_of_a_job_file(page: Any, up: Up, live: str) -> None:
    page.goto(f"{up.url}/#/job/{live}")
    page.locator("figure").first.wait_for()
    page.keyboard.press("0")
    page.get_by_role("heading", name="Job live: valid").wait_for(timeout=120_000)
    page.get_by_role("row", name="parallelism").wait_for()
    fits(page)
    page.locator("h1").click()
    page.keyboard.press("p")
    page.get_by_role("heading", name="Plan a job").wait_for()
    field = page.get_by_label("job file")
    field.fill("name: half\nmodel: {path: builtin:smollm2-135m-instruct}\n")
    page.get_by_role("button", name="Plan").click()
    page.locator("main p.error").first.wait_for()
    field.fill(json.dumps(job("whole")))  # JSON is YAML; of the uploads that the live job brought
    page.get_by_role("button", name="Plan").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Job whole: valid").wait_for(timeout=120_000)
    assert page.locator("main p.error").count() == 0
    fits(page)
    shot(page, "plan-file")


def test_fleets_and_who_has_their_servers(page: Any, up: Up, fleet: list[str]) -> None:
    page.goto(f"{up.url}/")
    page.get_by_role("heading", name="Jobs").wait_for()
    page.keyboard.press("f")
    page.get_by_role("heading", name="Fleets").wait_for()
    page.get_by_text("3 servers, 2 lent, 1 do not answer").wait_for()
    assert "nobody" in page.get_by_role("row", name="away").inner_text()
    for job_id in fleet:
        page.get_by_role("link", name=job_id).wait_for()
    fits(page)
    shot(page, "fleets")
    page.get_by_role("link", name="night", exact=True).focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Fleet night").wait_for()
    page.get_by_role("heading", name="Leases").wait_for()
    shares, leases = page.locator("section.shares"), page.locator("section.leases")
    for job_id, weight in zip(fleet, ("1", "3"), strict=True):
        row = shares.get_by_role("row", name=job_id)
        assert row.locator("td").nth(1).inner_text() == weight
        assert row.locator("td").nth(2).inner_text() == "1"
        assert row.get_by_role("progressbar", name="share wanted").count() == 1
        assert "lent" in leases.get_by_role("row", name=job_id).inner_text()
    fits(page)
    shot(page, "fleet")
    page.goto(f"{up.url}/#/fleet/nosuch")
    page.get_by_text("there is no fleet 'nosuch'").wait_for()


def test_by_keyboard_alone(page: Any, up: Up, live: str) -> None:
    page.goto(f"{up.url}/#/job/{live}")
    page.locator("figure").first.wait_for()
    page.keyboard.press("4")
    page.locator("input[aria-label='trainer.save_freq']").wait_for()
    page.locator("input[aria-label='trainer.save_freq']").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("7")
    page.keyboard.press("Enter")
    page.get_by_text("trainer.save_freq is asked for").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") in ("BUTTON", "INPUT", "A")
    with up.client() as client:
        asked = client.settings(live)
        value = next(item["value"] for item in asked["settings"] if item["key"] == "trainer.save_freq")
        assert asked["pending"].get("trainer.save_freq", value) == 7
    page.locator("input[aria-label='trainer.learning_rate']").fill('"fast"')
    page.locator("input[aria-label='trainer.learning_rate']").press("Enter")
    page.get_by_text("must be a number").wait_for()
    page.locator("h1").click()
    page.keyboard.press("j")
    page.get_by_role("heading", name="Jobs").wait_for()


def test_samples_are_compared_and_traced(page: Any, up: Up, live: str) -> None:
    page.goto(f"{up.url}/#/job/{live}/rollouts")
    page.locator("details").first.wait_for()
    page.locator("input[name=step]").fill("1")
    page.locator("input[name=other]").fill("3")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("heading", name="Step 3: 4 samples").wait_for()
    page.get_by_role("heading", name="Step 1: 4 samples").wait_for()
    page.locator("details summary").first.click()
    page.get_by_text("question 1").first.wait_for()
    page.get_by_role("link", name="trace").first.click()
    page.get_by_role("heading", name="Trace").wait_for()
    page.locator("tbody tr").first.wait_for()


def test_a_missing_token_is_asked_for(browser: Any, up: Up) -> None:
    context = browser.new_context()
    opened = context.new_page()
    opened.goto(f"{up.url}/")
    opened.get_by_label("Access token").fill((up.folder / "admin-token").read_text().strip())
    opened.keyboard.press("Enter")
    opened.get_by_role("heading", name="Jobs").wait_for()
    opened.locator("table, .hint").first.wait_for()
    context.close()
