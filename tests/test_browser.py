"""The report and the dashboard in a real Chromium: what a person sees, on a phone and on a desk, by day and by night.

With SCREENSHOTS=DIR in the environment, every page is kept there as a picture.
"""

import io
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from made_studies import confirm, fill, measured_reference, outcome
from optuna_dashboard import wsgi
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from search.dashboard import _Quiet, _Server
from search.report import __main__ as report
from search.report.page import render
from search.review import ReviewStorage
from search.store import Store, load, open_engine
from search.store.frames import frames

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1400, "height": 900}
LEGIBLE = 4.5  # contrast of text and ground (WCAG 2.2, 1.4.3)


@pytest.fixture(scope="session")
def chromium():
    names = ("chromium", "chromium-browser", "google-chrome")
    with sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, names)), None)  # None: the one that Playwright brings
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """Open an address; at the end, nothing must have gone wrong in any page.

    Ask for it after the server whose page it opens, so that pages are closed before the server ends.
    """
    complaints, contexts = [], []

    def open_page(address, viewport=DESK, scheme="light"):
        contexts.append(chromium.new_context(viewport=viewport, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [c for c in complaints if "favicon" not in c] == []


def picture(page, name):
    """A picture of the whole page, which must not be empty."""
    shot = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    if folder := os.environ.get("SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        shot.save(Path(folder) / f"{name}.png")
    assert len(shot.getcolors(maxcolors=shot.width * shot.height)) > 50
    return shot


def contrast(page, selector):
    """Contrast between an element's text (or fill) and the page's ground."""
    text, ground = page.evaluate(
        """selector => {
            const style = getComputedStyle(document.querySelector(selector));
            const ground = getComputedStyle(document.body).backgroundColor;
            return [selector.includes("svg") ? style.fill : style.color, ground];
        }""",
        selector,
    )

    def luminance(colour):
        parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(text), luminance(ground)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def written(folder, url):
    file = folder / "report.html"
    assert report.main(["--storage", url, "--out", str(file)]) == 0
    return file.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, DESK], ids=["phone", "desk"])
def test_the_report_is_legible_and_fits(open_page, searched, tmp_path, viewport, scheme):
    page = open_page(written(tmp_path, searched), viewport, scheme)
    plots = page.locator(".js-plotly-plot .main-svg:first-child")
    expect(plots.first).to_be_visible()
    figures = page.get_by_role("img")
    assert figures.count() >= 7 and all(figures.nth(n).get_attribute("aria-label") for n in range(figures.count()))
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    for box in (plots.nth(n).bounding_box() for n in range(plots.count())):
        assert box["width"] > 300 and box["height"] > 250 and box["x"] + box["width"] <= viewport["width"]
    for selector in ("p", ".soft", "th", "#plot-front svg .xtick text", "#plot-front svg .legendtext"):
        assert contrast(page, selector) >= LEGIBLE, selector
    shot = picture(page, f"report-{viewport['width']}-{scheme}")
    assert (sum(shot.getpixel((2, 2))) < 128) == (scheme == "dark")


def test_a_point_of_the_front_tells_its_knobs(open_page, searched, tmp_path):
    page = open_page(written(tmp_path, searched))
    best = load(searched).trials.query("on_front").sort_values("tps").iloc[-1]
    point = page.locator("#plot-front .points path.point").last
    point.scroll_into_view_if_needed()
    front = page.locator("#plot-front .trace.scatter").nth(1).locator("path.point").last
    box = front.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    shown = page.locator("#plot-front .hoverlayer .hovertext").first
    expect(shown).to_contain_text(f"trial {best.trial}")
    expect(shown).to_contain_text(f"sliding window {best.sliding_window}")


def test_the_report_is_printed_dark_on_white_also_at_night(open_page, searched, tmp_path):
    page = open_page(written(tmp_path, searched), scheme="dark")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert contrast(page, "#plot-front svg .xtick text") >= LEGIBLE and contrast(page, "p") >= LEGIBLE
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert page.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("kind", ["empty", "one trial", "all over the ceiling", "confirmed"])
def test_studies_of_every_kind_look_right(open_page, tmp_path, kind):
    store = measured_reference(tmp_path)
    if kind == "one trial":
        store.finish(outcome(0, tps=120.0))
    if kind == "all over the ceiling":
        for trial in range(30):
            store.finish(outcome(trial, state="PRUNED", ppl=2.5 + trial / 100, reason="over the ceiling"))
    if kind == "confirmed":
        fill(store, 40)
        confirm(store, 1)
    (tmp_path / "r.html").write_text(render(frames(store), ["python -m search.run"]))
    page = open_page((tmp_path / "r.html").as_uri(), PHONE)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    expect(page.locator("h1")).to_have_text("s")
    picture(page, f"report-{kind.replace(' ', '-')}")
    says = {"empty": "nothing to draw", "one trial": "Passed the gate: 1", "all over the ceiling": "no setting passed"}
    assert says.get(kind, "chance that a re-run bears it out") in page.locator("body").inner_text()


def test_five_thousand_trials_open_and_respond(open_page, tmp_path):
    store = measured_reference(tmp_path)
    fill(store, 5000)
    (tmp_path / "r.html").write_text(render(frames(store), []))
    started = time.monotonic()
    page = open_page((tmp_path / "r.html").as_uri())
    expect(page.locator("#plot-progress .main-svg").first).to_be_visible(timeout=20_000)
    opened_s = time.monotonic() - started
    page.locator("#plot-front").scroll_into_view_if_needed()
    box = page.locator("#plot-front .nsewdrag").first.bounding_box()
    started = time.monotonic()
    for step in range(40):  # until some point is under the pointer
        page.mouse.move(box["x"] + box["width"] * (step + 0.5) / 40, box["y"] + box["height"] / 2)
        if page.locator("#plot-front .hovertext").count():
            break
    assert page.locator("#plot-front .hovertext").count()
    print(f"opened in {opened_s:.1f} s, told of a point after {time.monotonic() - started:.1f} s")
    assert opened_s < 20 and time.monotonic() - started < 10
    picture(page, "report-5000")


@pytest.fixture
def dashboard():
    """Serve a study's database as `search.dashboard` does; the address of its first study."""
    servers = []

    def serve(url):
        from wsgiref.simple_server import make_server

        storage = ReviewStorage(url)
        app = wsgi(storage, artifact_store=storage.attachments)
        servers.append(make_server("127.0.0.1", 0, app, server_class=_Server, handler_class=_Quiet))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/dashboard/studies/1"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("viewport", [PHONE, DESK], ids=["phone", "desk"])
def test_the_dashboard_shows_a_finished_study(dashboard, open_page, searched, viewport):
    page, store = open_page(dashboard(searched), viewport), Store(open_engine(searched), "synthetic-simulated")
    expect(page.get_by_text("Best Trials").first).to_be_visible(timeout=20_000)
    page.wait_for_timeout(2000)  # its plots are drawn
    picture(page, f"dashboard-{viewport['width']}")
    page.goto(page.url.split("/studies/")[0] + "/studies/1/note")
    expect(page.get_by_text(f"{store.outcome(0).ceiling:.4f}").first).to_be_visible(timeout=20_000)
    picture(page, f"dashboard-note-{viewport['width']}")


def test_the_dashboard_follows_a_search_that_goes_on(dashboard, open_page, python, study_folder, tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    simulated = ["--engine", "simulated", "--sampler", "random"]  # trials that take no time
    command = [python, "-m", "search.run", *simulated, "--study", study_folder, "--trials", "400"]
    with subprocess.Popen([*command, "--storage", url], cwd=tmp_path, stdout=subprocess.DEVNULL) as searching:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (tmp_path / "study.db").exists():
            time.sleep(0.1)
        store = Store(open_engine(url), "synthetic-simulated")
        while time.monotonic() < deadline and len(store.outcomes()) < 20:
            time.sleep(0.1)
        page = open_page(dashboard(url).replace("/studies/1", "/studies/1/trials"))
        expect(page.get_by_text("Trial 3").first).to_be_visible(timeout=20_000)
        picture(page, "dashboard-running")
        assert searching.wait(timeout=120) == 0
    assert store.finished() == 400
