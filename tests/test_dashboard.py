"""Optuna Dashboard on our studies: what its own API says of them."""

import json
import signal
import subprocess
import urllib.request

import httpx
import optuna
import pytest
from optuna.trial import TrialState
from optuna_dashboard import save_note, wsgi
from test_study import Silent

from search.review import ReviewStorage
from search.spec import read_study
from search.store import Store, open_engine
from search.study import search


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/study.db"


@pytest.fixture
def run(study_folder, options):
    def run(trials, engine="simulated", observer=None):
        asked = options(trials, engine=engine, sampler="random")
        return search(read_study(study_folder), asked, observer or Silent())

    return run


def connected(url):
    """A client of a dashboard on the database."""
    storage = ReviewStorage(url)
    app = wsgi(storage, artifact_store=storage.attachments)
    return httpx.Client(transport=httpx.WSGITransport(app=app), base_url="http://d")


def detail(url):
    """The study as the dashboard's page asks for it."""
    with connected(url) as client:
        (study,) = client.get("/api/studies").json()["study_summaries"]
        return client.get(f"/api/studies/{study['study_id']}").json()


def test_the_best_trials_are_under_the_ceiling_and_constraints_are_shown(run, url):
    run(40)
    store, shown = Store(open_engine(url), "synthetic-simulated"), detail(url)
    ceiling = store.outcome(0).ceiling
    assert shown["best_trials"]
    assert all(store.outcome(t["number"]).ppl <= ceiling for t in shown["best_trials"])
    for trial in shown["trials"]:
        outcome = store.outcome(trial["number"])
        assert trial["constraints"] == [outcome.excess]
        assert (trial["state"] == "Pruned") == (outcome.excess > 0)


def test_notes_say_how_each_trial_ended_and_the_front_is_a_figure_of_the_study(run, url):
    run(30)
    store, shown = Store(open_engine(url), "synthetic-simulated"), detail(url)
    assert f"perplexity **{store.outcome(0).ceiling:.4f}**" in shown["note"]["body"]
    assert "SIMULATED" in shown["note"]["body"] and "search.export" not in shown["note"]["body"]
    for trial in shown["trials"]:
        outcome, body = store.outcome(trial["number"]), trial["note"]["body"]
        if outcome.state == "PRUNED":
            assert body.startswith(f"Pruned: {outcome.reason}")
        else:
            assert f"{outcome.tps:.1f} tok/s [{outcome.tps_low:.1f}, {outcome.tps_high:.1f}]" in body
    (figure,) = shown["plotly_graph_objects"]
    assert figure["id"] == "feasible-front"
    assert {trace["name"] for trace in json.loads(figure["graph_object"])["data"]} >= {"front", "reference"}


def test_a_failed_trial_says_why(run, url):
    with pytest.raises(Exception, match="10 trials in a row failed"):
        run(30, engine="tests.odd_engines:NoMemoryForDrafts")
    failed = [t for t in detail(url)["trials"] if t["state"] == "Fail"]
    assert failed and all("Failed in speed (out-of-memory):" in t["note"]["body"] for t in failed[:2])


def test_manifests_and_logs_are_artifacts_without_their_secrets(run, url, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "not-for-everyone")
    run(5)
    store = Store(open_engine(url), "synthetic-simulated")
    store.add_export(3, tmp_path / "m", {"name": "exported"})
    (log,) = (tmp_path / "logs").glob("worker-*.log")
    log.write_text("loaded with not-for-everyone")
    shown = detail(url)
    names = {artifact["filename"]: artifact["artifact_id"] for artifact in shown["artifacts"]}
    (trial,) = [t for t in shown["trials"] if t["artifacts"]]
    (manifest,) = trial["artifacts"]
    assert trial["number"] == 3 and set(names) == {log.name}
    with connected(url) as client:
        assert client.get(f"/artifacts/1/{names[log.name]}").text == "loaded with ***"
        assert client.get(f"/artifacts/1/{trial['trial_id']}/{manifest['artifact_id']}").json() == {"name": "exported"}
        assert client.get("/artifacts/1/abc").status_code == 404
        assert client.delete(f"/api/artifacts/1/{names[log.name]}").status_code == 204
    assert log.exists()


def test_the_log_of_a_failed_trial_is_its_artifact(run, url):
    with pytest.raises(Exception, match="10 trials in a row failed"):
        run(30, engine="tests.odd_engines:NoMemoryForDrafts")
    failed = [t for t in detail(url)["trials"] if t["state"] == "Fail"]
    assert all(a["filename"].startswith("worker-") for t in failed[:2] for a in t["artifacts"])
    assert failed[0]["artifacts"]


def test_a_study_is_deleted_in_the_dashboard_and_its_files_stay(run, url, tmp_path):
    run(5)
    with connected(url) as client:
        assert client.delete("/api/studies/1").status_code == 204
        assert client.get("/api/studies").json()["study_summaries"] == []
    assert list((tmp_path / "logs").glob("worker-*.log"))


def test_nothing_is_written_and_a_persons_note_stays(run, url):
    run(10)
    study = optuna.load_study(study_name="synthetic-simulated", storage=url)

    def attributes():
        return study._storage.get_study_system_attrs(study._study_id)

    before = attributes()
    detail(url)
    assert attributes() == before
    save_note(study, "mine")
    assert detail(url)["note"]["body"] == "mine"


def test_a_search_goes_on_while_the_dashboard_polls_it(run, url):
    seen = []

    class Polling(Silent):
        def finished(self, outcome, finished, front):
            seen.append(len(detail(url)["trials"]))

    summary = run(12, observer=Polling())
    assert summary.counts["complete"] + summary.counts["pruned"] == 12
    assert seen == sorted(seen) and seen[-1] >= 12
    trials = optuna.load_study(study_name="synthetic-simulated", storage=url).get_trials()
    assert not [t for t in trials if t.state == TrialState.RUNNING]


def test_the_command_serves_on_loopback_and_warns_beyond(run, url, python, tmp_path):
    run(5)
    for host, warns in (("127.0.0.1", False), ("0.0.0.0", True)):
        command = [python, "-m", "search.dashboard", "--storage", url, "--host", host, "--port", "0"]
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
            line = process.stdout.readline()
            assert line.startswith("WARNING: whoever reaches") == warns
            line = process.stdout.readline() if warns else line
            port = line.split(f"http://{host}:")[1].split("/")[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/dashboard", timeout=20) as page:
                assert page.status == 200
            process.send_signal(signal.SIGINT)
            try:
                assert process.wait(timeout=15) == 0
            finally:
                process.kill()


def test_no_database_is_one_sentence(python, tmp_path):
    command = [python, "-m", "search.dashboard", "--storage", "sqlite:///none.db"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "There is no study database none.db" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "none.db").exists()
