"""Several searchers on one study, each in a process that a real Ray has placed, on the simulated engine.

A searcher takes a share of the processor here instead of a GPU, or a GPU that Ray only believes in.
"""

import json
import os
import signal
import subprocess
import time
import uuid
from contextlib import contextmanager, suppress

import optuna
import psutil
import pytest
from optuna.trial import TrialState
from sqlalchemy import select

from search.engine.simulated import TAKES
from search.errors import UsageError
from search.fleet import Fleet, check_fleet, read_fleet
from search.recovery import at_work
from search.store import Store, full_url, open_engine
from search.store.models import Searcher
from tests.faults.proxy import Proxy

NAME = "synthetic-simulated"
STARTED_BY = "TEST_CLUSTER"  # environment key


@pytest.fixture
def url(postgres):
    postgres.psql("DROP DATABASE IF EXISTS cluster WITH (FORCE)")
    postgres.psql("CREATE DATABASE cluster")
    return postgres.get_uri("cluster")


@contextmanager
def running(python, folder, trials, storage, *arguments, takes=0.0, engine="simulated"):
    """A search of several searchers; `takes` seconds a trial. Ended, if it has not, when the block is left."""
    command = [python, "-m", "search.run", "--study", str(folder), "--engine", engine, "--json"]
    # The default sampler may ask for a setting twice, to time it on all prompts.
    command += ["--trials", str(trials), "--storage", storage, "--sampler", "tpe", *arguments]
    stamp = uuid.uuid4()
    environment = {**os.environ, TAKES: str(takes), STARTED_BY: str(stamp)}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stamp = stamp
    try:
        yield process
    except BaseException:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        print(process.communicate(timeout=30)[1])
        raise


def summary_of(process):
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors and said.count("\n") == 1, said
    return json.loads(said), errors


def wait_for(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)


def check(storage, trials):
    """Exactly so many trials stand finished, in our store and in Optuna's, and none was measured twice."""
    store = Store(open_engine(storage), NAME)
    outcomes = [o for o in store.outcomes() if o.state != "FAIL"]
    assert len(outcomes) == store.finished() == trials
    assert store.slots() == [] and store.leases() == {}
    told = optuna.load_study(study_name=NAME, storage=full_url(storage)).get_trials()
    ended = {t.number: t.state for t in told if t.state in (TrialState.COMPLETE, TrialState.PRUNED)}
    assert ended == {o.trial: TrialState[o.state] for o in outcomes}
    assert not [t for t in told if t.state == TrialState.RUNNING]
    measured = [o for o in outcomes if o.reused_from is None]
    assert len({o.setting_key for o in measured}) == len(measured)
    for o in measured:
        assert len(store.measurements("speed", "done", o.trial)) == (o.state == "COMPLETE")
        gates = [store.measurements("gate", status, o.trial) for status in ("done", "remembered", "proof")]
        assert sum(map(len, gates)) == 1
    return store


def left_of(process):
    """Processes that a search has started, Ray's among them, and that still run."""
    found = set()
    for candidate in psutil.process_iter():
        with suppress(psutil.Error):  # it ended just now, or belongs to someone else
            if candidate.environ().get(STARTED_BY) == str(process.stamp) and candidate.status() != psutil.STATUS_ZOMBIE:
                found.add(candidate.pid)
    return found


def test_two_searchers_finish_one_study_on_the_scale_of_the_first_ones_card(study_folder, python, tmp_path):
    storage, slower = f"sqlite:///{tmp_path}/s.db", "tests.odd_engines:SlowerShare"
    arguments = ("--gpus", "cpu:2", "--sampler", "random")
    with (study_folder / "study.yaml").open("a") as file:
        file.write("objectives: [tps, ppl, ttft_s]\n")
    with running(python, study_folder, 40, storage, *arguments, takes=0.05, engine=slower) as process:
        summary, errors = summary_of(process)
    assert summary["objectives"] == ["tps", "ppl", "ttft_s"]
    assert optuna.load_study(study_name=NAME, storage=storage).metric_names == summary["objectives"]
    assert summary["trials"]["complete"] + summary["trials"]["pruned"] == 40
    assert summary["engine_starts"] == 2 and errors.count("[40/40]") == 1
    store = check(storage, 40)
    cards = {"simulated share 0", "simulated share 1"}
    assert set(summary["cards"]) == cards and sum(summary["cards"].values()) == 40
    assert {point["card"] for point in summary["front"]} <= cards
    (reference,) = store.measurements("speed", "done", -1)
    first = next(e.card for e in store.environments() if e.id == reference.environment_id)
    outcomes = [o for o in store.outcomes() if o.state == "COMPLETE"]
    for o in outcomes:
        scale = 1.0 if o.card == first else 1.5 if first == "simulated share 0" else 1 / 1.5
        assert o.tps == pytest.approx(scale * o.card_tps, rel=0.01)
        assert o.tps_low < o.tps < o.tps_high
        (measured,) = store.measurements("speed", "done", o.source)
        assert o.figures["ttft_s"] == pytest.approx(measured.figures["ttft_s"] / scale, rel=0.02)
    assert {o.card for o in outcomes} == cards and len({o.ceiling for o in outcomes}) == 1


def test_a_killed_searcher_a_restarted_database_and_a_cut_network_cost_time_and_no_trial(
    study_folder, python, url, postgres
):
    proxy = Proxy(url)
    with running(python, study_folder, 60, proxy.url, "--gpus", "cpu:3", takes=0.4) as process:
        store = Store(open_engine(url), NAME)
        wait_for(lambda: store.finished() >= 5)
        held = next(slot for slot in store.slots() if slot.trial is not None)
        os.kill(int(held.owner.rsplit(" ", 2)[1]), signal.SIGKILL)
        wait_for(lambda: store.finished() >= 15)
        proxy.cut(3.0)
        wait_for(lambda: store.finished() >= 25)
        restart(postgres)
        summary, _ = summary_of(process)
    assert summary["trials"]["failed"] == 0
    store = check(url, 60)
    assert len(store.environments()) == 4  # three searchers, and the one that Ray started again
    told = optuna.load_study(study_name=NAME, storage=full_url(url)).get_trials()
    again = [t.user_attrs["asked_before_as"] for t in told if "asked_before_as" in t.user_attrs]
    assert held.trial in again  # its trial was given back
    assert left_of(process) == set()


def restart(postgres):
    """Restart the server; whoever is connected is thrown out."""
    from pgserver._commands import pg_ctl
    from pgserver.utils import PostmasterInfo

    pg_ctl(["-w", "-m", "fast", "restart"], pgdata=postgres.pgdata, user=postgres.system_user)
    postgres._postmaster_info = PostmasterInfo.read_from_pgdata(postgres.pgdata)


def test_a_gpu_that_joins_gets_a_searcher_and_one_that_leaves_costs_its_trial(study_folder, python, url):
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1, num_gpus=1)
        with running(python, study_folder, 18, url, "--cluster", cluster.address, takes=1.0) as process:
            store = Store(open_engine(url), NAME)
            wait_for(lambda: store.finished() >= 1)
            second = cluster.add_node(num_cpus=1, num_gpus=1)
            wait_for(lambda: any("searcher 1" in name for name in names(store)) and len(store.slots()) == 2)
            cluster.remove_node(second, allow_graceful=False)
            _, errors = summary_of(process)
    finally:
        cluster.shutdown()
        ray.shutdown()
    check(url, 18)
    assert "searcher 1: on" in errors


def names(store):
    """Of the searchers at work."""
    with store._reading() as session:
        return list(session.scalars(select(Searcher.name)))


def test_ctrl_c_ends_every_searcher_and_leaves_no_process_behind(study_folder, python, tmp_path):
    storage = f"sqlite:///{tmp_path}/s.db"
    with running(python, study_folder, 500, storage, "--gpus", "cpu:2", takes=0.3) as process:
        wait_for(lambda: (tmp_path / "s.db").exists() and Store(open_engine(storage), NAME).finished() >= 4)
        process.send_signal(signal.SIGINT)
        asked = time.monotonic()
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 130 and time.monotonic() - asked < 20  # 5 where nothing else runs
    assert "Interrupted. Everything measured so far is kept" in errors and "Traceback" not in errors
    wait_for(lambda: not left_of(process), 20)
    store = Store(open_engine(storage), NAME)
    assert store.slots() == []
    with running(python, study_folder, store.finished() + 6, storage) as process:  # one alone goes on
        summary_of(process)
    check(storage, store.finished())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpus", "cpu:0"], "after cpu: stands how many searchers"),
        (["--gpus", "0,0"], "write indices like 0,1,2, each once"),
        (["--gpus", "97"], "there is no GPU 97 here"),
        (["--gpus", "0", "--cluster", "auto"], "a cluster's GPUs are found by Ray"),
        (["--searchers", "2"], "--searchers N, at least 1, goes with --cluster"),
        (["--cluster", "auto"], "SQLite is a file of one host"),
    ],
)
def test_a_fleet_that_cannot_be_is_one_sentence(study_folder, capsys, arguments, says):
    from search.run import main

    with pytest.raises(SystemExit) as ended:
        main(["--study", str(study_folder), "--engine", "simulated", *arguments])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_without_ray_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr("search.fleet.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"need Ray: pip install 'vllm-pareto\[cluster\]'"):
        check_fleet(Fleet(cpus=2), "sqlite:///s.db")


def test_a_search_without_a_fleet_does_not_load_ray(study_folder, python, tmp_path):
    code = "import sys, search.run; search.run.main(sys.argv[1:]); assert 'ray' not in sys.modules"
    command = [python, "-c", code, "--study", str(study_folder), "--engine", "simulated", "--trials", "2"]
    subprocess.run([*command, "--storage", f"sqlite:///{tmp_path}/s.db"], check=True, capture_output=True, timeout=60)


def test_a_fleet_is_read_from_the_command_line():
    assert read_fleet("0,2", None, None) == Fleet(gpus=(0, 2))
    assert read_fleet("cpu:4", "auto", None) == Fleet(cpus=4, address="auto")
    assert read_fleet(None, "head:6379", 8) == Fleet(address="head:6379", searchers=8)


def test_a_searcher_elsewhere_is_at_work_as_long_as_its_lease_is_fresh():
    owner = "another-host/1 1 boot/1"
    assert at_work(owner, {owner: 100.0})
    assert not at_work(owner, {owner: 200.0})
    assert not at_work(owner, {})
