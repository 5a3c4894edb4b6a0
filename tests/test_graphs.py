"""Live knobs on a GPU's model runner, as far as they can be looked at without one: what is rebuilt, and from what."""

from types import SimpleNamespace

import pytest
import torch

from search.engine.graphs import GraphRunner
from search.engine.live import LiveKnobs

MOST = 10


class Manager:
    """Stands for vLLM's `ModelCudaGraphManager`."""

    made = ()

    def __init__(self, config, device, mode, decode_query_len, lora_capture_cases):
        self.cudagraph_mode, self.decode_query_len = mode, decode_query_len
        Manager.made += (decode_query_len,)


class Speculator:
    """Stands for vLLM's `Gemma4Speculator`."""

    def __init__(self):
        self.num_speculative_steps = MOST
        self.draft_tokens = torch.zeros(1, MOST, dtype=torch.int64)
        self.managers_for = []

    def init_cudagraph_manager(self, mode):
        self.managers_for.append(self.num_speculative_steps)


@pytest.fixture
def runner():
    Manager.made = ()
    made = SimpleNamespace(
        speculator=Speculator(),
        num_speculative_steps=MOST,
        decode_query_len=MOST + 1,
        model_state=SimpleNamespace(num_new_sampled_tokens_per_step=1),
        req_states=SimpleNamespace(draft_tokens=torch.zeros(1, MOST, dtype=torch.int64)),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[11, 22]),
        vllm_config=None,
        device=None,
        lora_capture_cases=[0],
        captured=0,
    )
    made.cudagraph_manager = Manager(None, None, "FULL", MOST + 1, [0])

    def capture_model():
        made.captured += 1

    made.capture_model = capture_model
    return made


@pytest.fixture
def scheduler():
    return SimpleNamespace(_spec_token_placeholders=[-1] * MOST)


def test_k_is_what_is_drafted_verified_and_captured(runner, scheduler):
    graphs = GraphRunner(runner)
    graphs.set_drafts(3, scheduler)
    graphs.capture()
    assert (runner.num_speculative_steps, runner.decode_query_len) == (3, 4)
    assert runner.speculator.num_speculative_steps == 3 and runner.speculator.managers_for == [3]
    assert Manager.made[-1] == 4 and runner.captured == 1
    assert {1, 4} <= set(runner.compilation_config.cudagraph_capture_sizes)
    assert scheduler._spec_token_placeholders == [-1] * 3


def test_buffers_stay_where_captured_graphs_write(runner, scheduler):
    graphs, before = GraphRunner(runner), runner.speculator.draft_tokens
    for drafts in (2, 0, 7):
        graphs.set_drafts(drafts, scheduler)
    assert runner.speculator.draft_tokens.shape == runner.req_states.draft_tokens.shape == (1, 7)
    assert runner.speculator.draft_tokens.data_ptr() == before.data_ptr()
    assert runner.speculator.draft_tokens.stride() == before.stride()


def test_without_drafts_there_is_no_drafter_and_it_comes_back(runner, scheduler):
    graphs, speculator = GraphRunner(runner), runner.speculator
    graphs.set_drafts(0, scheduler)
    graphs.capture()
    assert runner.speculator is None and runner.decode_query_len == 1 and speculator.managers_for == []
    graphs.set_drafts(5, scheduler)
    assert runner.speculator is speculator


def test_sizes_do_not_pile_up_over_a_search(runner, scheduler):
    graphs = GraphRunner(runner)
    for drafts in (3, 5, 2):
        graphs.set_drafts(drafts, scheduler)
        graphs.capture()
    assert runner.compilation_config.cudagraph_capture_sizes == [1, 3, 11, 22]


def test_an_engine_without_graphs_captures_none(runner, scheduler):
    runner.cudagraph_manager.cudagraph_mode = None
    GraphRunner(runner).capture()
    assert runner.captured == 0


def test_graphs_are_captured_again_only_when_something_changed(runner, scheduler):
    scheduler.dynamic_sd_lookup, scheduler.num_spec_tokens, scheduler.max_num_running_reqs = None, MOST, 1
    runner.device, runner.attn_groups, runner.model, runner.speculative_config = (
        torch.device("cuda"),
        [],
        None,
        SimpleNamespace(method="mtp"),
    )
    worker = SimpleNamespace(model_runner=runner)
    core = SimpleNamespace(scheduler=scheduler, model_executor=SimpleNamespace(driver_worker=worker))
    live = LiveKnobs(core)
    for drafts in (3, 3, 5):
        live.apply({"num_speculative_tokens": drafts})
    assert runner.captured == 2
    fine, runner.capture_model = runner.capture_model, fail
    with pytest.raises(MemoryError):
        live.apply({"num_speculative_tokens": 7})
    runner.capture_model = fine
    live.apply({"num_speculative_tokens": 7})  # what the failed capture left is not trusted
    assert runner.captured == 3 and runner.cudagraph_manager is not None


def fail():
    raise MemoryError
