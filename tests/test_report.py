"""The report: what it says is what the store holds, whatever the study looks like."""

import json
import re
import time
from html.parser import HTMLParser

import moocore
import pytest
from made_studies import confirm, fill, measured_reference, outcome

from search.report import __main__ as command
from search.report.hypervolume import progress
from search.report.page import headline, render
from search.store import REFERENCE, Store, load, open_engine
from search.store.frames import frames


class Page(HTMLParser):
    """Texts by the id of their element, and rows of tables as lists of cells."""

    def __init__(self, html):
        super().__init__()
        self.texts, self.tables, self.urls = {}, {}, []
        self._open, self._table = [], None
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.urls += [v for k, v in attributes.items() if k in ("src", "href")]
        if tag == "table":
            self._table = self.tables.setdefault(attributes["id"], [])
        if tag == "tr" and self._table is not None:
            self._table.append([])
        self._open.append((tag, attributes.get("id")))

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for tag, name in reversed(self._open):
            if name and tag != "table":
                self.texts[name] = self.texts.get(name, "") + data
            if tag in ("td", "th") and self._table:
                self._table[-1].append(data)


@pytest.fixture
def store(tmp_path):
    return measured_reference(tmp_path)


def page_of(store):
    return Page(render(frames(store), ["python -m search.run"]))


def test_the_pages_figures_are_the_stores(searched, tmp_path, capsys):
    assert command.main(["--storage", searched, "--out", str(tmp_path / "r.html")]) == 0
    html = (tmp_path / "r.html").read_text()
    page, store = Page(html), Store(open_engine(searched), "synthetic-simulated")
    best, reference = store.best(), store.outcome(REFERENCE)
    assert page.texts["tps"] == f"{best.tps:.1f}"
    assert page.texts["times"] == f"{best.tps / reference.tps:.2f}"
    assert (page.texts["ppl"], page.texts["p-pass"]) == (f"{best.ppl:.4f}", "–")
    rows = page.tables["front"][1:]
    assert [row[0] for row in rows] == [str(p.trial) for p in store.front()]
    assert [row[-4:] for row in rows] == [
        [f"{p.tps:.1f}", f"{p.tps_low:.1f}", f"{p.tps_high:.1f}", f"{p.ppl:.4f}"] for p in store.front()
    ]
    assert "SIMULATED" in html and "not confirmed" in html
    names = re.findall(r'id="plot-([a-z-]+)"', html)
    assert set(names) >= {"front", "ppl", "knobs", "acceptance", "importance", "progress", "time"}


def test_the_page_needs_no_network_and_shows_no_markup_of_others(store):
    html = render(frames(store), ["x"])
    assert Page(html).urls == []
    assert "<script>alert(1)</script>" not in html and "&lt;script&gt;alert(1)" in html


def test_a_study_without_trials_has_a_page(store):
    page = page_of(store)
    assert page.texts["tps"] == "–" and "front" not in page.tables


def test_a_study_of_one_trial_has_a_page(store):
    store.finish(outcome(0, tps=120.0))
    assert page_of(store).texts["times"] == "1.20"


def test_where_nothing_passed_the_gate_the_page_says_so(store):
    for trial in range(30):
        store.finish(outcome(trial, state="PRUNED", ppl=2.5 + trial / 100))
    study = frames(store)
    assert headline(study).who == "no setting passed the gate"
    assert "Passed the gate: 0; pruned: 30; there is no front." in render(study, [])


def test_failures_are_counted_by_class_and_warnings_shown(store):
    for trial in range(3):
        store.finish(
            outcome(trial, state="FAIL", ppl=None, failure="hang", failed_stage="speed", reason="hang in speed")
        )
    store.finish(outcome(3, tps=110.0, warning="its outputs loop"))
    html = render(frames(store), [])
    assert Page(html).tables["failures"][1] == ["hang", "speed", "3", "hang in speed"]
    assert "Trial 3: its outputs loop." in html


def test_a_confirmed_winner_makes_the_headline(store):
    store.finish(outcome(0, tps=150.0))
    confirm(store, 0)
    page = page_of(store)
    assert [page.texts[k] for k in ("tps", "times", "ppl", "p-pass")] == ["138.0", "1.50", "2.3100", "97.3%"]
    assert page.tables["finalists"][1][:3] == ["0", "138.0", "139.0"]


def test_a_study_of_five_thousand_trials_is_written_in_seconds_and_can_be_mailed(store):
    fill(store, 5000)
    started = time.perf_counter()
    html = render(frames(store), [])
    assert time.perf_counter() - started < 10
    assert len(html.encode()) < 6e6


def test_a_report_of_nothing_is_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--storage", f"sqlite:///{tmp_path}/none.db"])
    assert stopped.value.code == 1 and "There is no study database" in capsys.readouterr().err


def test_frames_hold_a_row_for_each_trial_and_stage(searched):
    study, store = load(searched), Store(open_engine(searched), "synthetic-simulated")
    assert len(study.trials) == len(store.outcomes()) and len(study.stages) == len(store.stages())
    row, stored = study.trials.loc[7], store.outcome(7)
    assert (row.state, row.sliding_window) == (stored.state, stored.setting["sliding_window"])
    assert json.loads(study.trials.on_front.to_json()).keys() >= {str(p.trial) for p in store.front()}


def test_the_hypervolume_is_that_of_another_implementation():
    import random

    draw = random.Random(5)
    points = [(draw.uniform(50, 200), draw.uniform(2.2, 2.6)) if draw.random() < 0.8 else None for _ in range(60)]
    found = progress(points, ceiling=2.42)
    for count in (1, 7, 30, 60):
        kept = [[-tps, ppl] for tps, ppl in filter(None, points[:count]) if ppl < 2.42]
        expected = moocore.hypervolume(kept, ref=[0.0, 2.42]) if kept else 0.0
        assert found[count - 1] == pytest.approx(expected)
    assert found == sorted(found)


def test_where_there_are_several_cards_the_front_says_which(store):
    store.finish(outcome(0, tps=100.0, ppl=2.3, card="GPU-a", card_tps=100.0))
    assert "measured on" not in page_of(store).tables["front"][0]
    store.finish(outcome(1, tps=120.0, ppl=2.4, card="GPU-b", card_tps=80.0))
    head, *rows = page_of(store).tables["front"]
    assert head[-2:] == ["measured on", "tokens a second there"]
    assert [row[-2:] for row in rows] == [["GPU-a", "100.0"], ["GPU-b", "80.0"]]
