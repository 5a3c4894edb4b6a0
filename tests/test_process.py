"""The worker process as its parent sees it, with the simulated engine inside."""

import os
import signal
import time
from pathlib import Path

import pytest

from search.engine.process import Worker, WorkerError
from search.engine.protocol import Applied, Apply, Decode, Decoded, Load, Loaded, Score, Scored

LIMITS = {"sliding_window": 512, "centroid_top_k": 128, "num_speculative_tokens": 10}
SETTING = {"sliding_window": 128, "centroid_top_k": 16, "num_speculative_tokens": 4}


@pytest.fixture
def worker(tmp_path):
    with Worker("simulated", tmp_path / "worker.log") as worker:
        yield worker


def load(worker):
    return worker.ask(Load(model="m", drafter="d", args={}, limits=LIMITS), Loaded, 30)


def test_every_request_is_answered_with_its_reply(worker):
    assert load(worker).environment["simulated"] is True
    applied = worker.ask(Apply(setting=SETTING, probe=[1, 2], probe_tokens=4), Applied, 30)
    assert applied.effective == SETTING
    scored = worker.ask(Score(record="r", context=[1], target=[2, 3]), Scored, 30)
    assert (scored.record, scored.tokens) == ("r", 2)
    decoded = worker.ask(Decode(prompt_id="p", prompt=[1, 2, 3], max_tokens=32), Decoded, 30)
    assert decoded.tokens == 32 and decoded.draft_tokens == 4 * decoded.drafts


def test_a_refused_setting_leaves_the_worker_usable(worker):
    load(worker)
    with pytest.raises(WorkerError, match="over the limit") as caught:
        worker.ask(Apply(setting={"num_speculative_tokens": 11}, probe=[1], probe_tokens=1), Applied, 30)
    assert (caught.value.kind, caught.value.fatal) == ("bad-setting", False)
    assert worker.ask(Apply(setting=SETTING, probe=[1], probe_tokens=1), Applied, 30).effective == SETTING


def test_a_killed_worker_is_a_crash_that_names_the_log(worker):
    load(worker)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"killed by SIGKILL.*worker\.log") as caught:
        worker.ask(Score(record="r", context=[1], target=[2]), Scored, 30)
    assert (caught.value.kind, caught.value.fatal) == ("crash", True)


def test_a_silent_worker_is_a_hang_and_is_ended(worker):
    load(worker)
    os.kill(worker.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(WorkerError, match="did not answer") as caught:
        worker.ask(Score(record="r", context=[1], target=[2]), Scored, 0.5)
    assert caught.value.kind == "hang"
    assert time.monotonic() - started < 5
    assert not Path(f"/proc/{worker.pid}").exists()


def test_ending_a_worker_twice_is_harmless(worker):
    load(worker)
    worker.end()
    worker.end()
    assert not Path(f"/proc/{worker.pid}").exists()


def test_the_worker_ignores_ctrl_c_of_the_terminal(worker):
    load(worker)
    os.kill(worker.pid, signal.SIGINT)
    assert worker.ask(Score(record="r", context=[1], target=[2]), Scored, 30).tokens == 1
