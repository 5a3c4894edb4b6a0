"""The worker process as its parent sees it, with the simulated engine inside."""

import os
import signal
import threading
import time

import pytest

from search.engine.process import Worker, WorkerError
from search.engine.protocol import Applied, Apply, Decode, Decoded, DecodeTogether, Load, Loaded, Score, Scored

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
    wave = DecodeTogether(wave="w", prompts={"p": [1, 2, 3], "q": [4]}, max_tokens=32)
    together = worker.ask(wave, Decoded, 30)
    assert (together.prompt_id, together.tokens) == ("w", 64) and together.draft_tokens == 4 * together.drafts
    assert decoded.latency_s < together.latency_s < 2 * decoded.latency_s


def test_a_refused_setting_leaves_the_worker_usable(worker):
    load(worker)
    with pytest.raises(WorkerError, match="over the limit") as caught:
        worker.ask(Apply(setting={"num_speculative_tokens": 11}, probe=[1], probe_tokens=1), Applied, 30)
    assert (caught.value.kind, caught.value.fatal) == ("bad-setting", False)
    assert worker.ask(Apply(setting=SETTING, probe=[1], probe_tokens=1), Applied, 30).effective == SETTING


def python_of(worker):
    """The worker's own process: the group is it and its leash."""
    (pid,) = worker.members - {worker._group.pid}
    return pid


@pytest.mark.parametrize(
    ("sign", "kind"),
    [(signal.SIGKILL, "infrastructure"), (signal.SIGTERM, "infrastructure"), (signal.SIGSEGV, "crash")],
)
def test_who_ended_a_worker_tells_whose_fault_it_was(worker, sign, kind):
    load(worker)
    os.kill(python_of(worker), sign)
    with pytest.raises(WorkerError, match=rf"score; killed by {sign.name}.*worker\.log") as caught:
        worker.ask(Score(record="r", context=[1], target=[2]), Scored, 30)
    assert (caught.value.kind, caught.value.fatal) == (kind, True)


def test_a_silent_worker_is_a_hang_and_is_ended(worker):
    load(worker)
    os.kill(python_of(worker), signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(WorkerError, match="silent for 0 s") as caught:
        worker.ask(Score(record="r", context=[1], target=[2]), Scored, 0.4)
    assert caught.value.kind == "hang"
    assert time.monotonic() - started < 5
    assert worker.members == set()


def test_a_worker_that_prints_is_not_silent_but_its_time_can_be_up(worker):
    load(worker)
    os.kill(python_of(worker), signal.SIGSTOP)
    printing = threading.Event()

    def write():
        while not printing.wait(0.1):
            with worker.log.open("a") as log:
                log.write("still loading\n")

    thread = threading.Thread(target=write)
    thread.start()
    started = time.monotonic()
    with pytest.raises(WorkerError, match="its time was up"):
        worker.ask(Score(record="r", context=[1], target=[2]), Scored, 1.5, time.monotonic() + 4)
    printing.set()
    thread.join()
    assert 3.5 < time.monotonic() - started < 6


def test_ending_a_worker_twice_is_harmless(worker):
    load(worker)
    worker.end()
    worker.end()
    assert worker.members == set()


def test_the_worker_ignores_ctrl_c_of_the_terminal(worker):
    load(worker)
    os.killpg(worker._group.pid, signal.SIGINT)
    assert worker.ask(Score(record="r", context=[1], target=[2]), Scored, 30).tokens == 1
