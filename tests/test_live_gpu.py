"""Live equals cold on a GPU, on gemma-4-E4B-it's shape. Minutes, 100 GB of its memory; run by hand there:

    python -m pytest tests/test_live_gpu.py -s

All engines start side by side, then the live one is held against each cold one in turn.
"""

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from conftest import MINIATURE, ROOT
from test_kernels_vllm import vllm_on_a_gpu

from search.data import Prompt, Record
from search.engine import gpu
from search.engine.process import Worker
from search.engine.protocol import Loaded
from search.knobs import DRAFTS, TOP_K, WINDOW
from search.spec import read_study
from tests.live_and_cold import LOAD_S, apply, cold_request, decode, live_request, require_equal, score

pytestmark = [
    pytest.mark.skipif(not vllm_on_a_gpu(), reason="needs a CUDA GPU and vLLM 0.26"),
    pytest.mark.timeout(1200),
]

# K at none, small, middle and largest; four windows, two top-k.
SETTINGS = [
    {WINDOW: 512, TOP_K: 49, DRAFTS: 0},
    {WINDOW: 320, TOP_K: 128, DRAFTS: 3},
    {WINDOW: 188, TOP_K: 49, DRAFTS: 7},
    {WINDOW: 64, TOP_K: 128, DRAFTS: 10},
]
# No engine may take the memory of the others.
ARGS = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30}
SAME_LOGPROB = 1e-4  # nats, between two engines of one setting


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    """A live engine of E4B's shape, and a cold one for each setting."""
    folder = tmp_path_factory.mktemp("shape")
    subprocess.run([sys.executable, "studies/gemma-4-e4b-a10g/make_shape.py", folder], cwd=ROOT, check=True)
    spec = read_study(folder)
    requests = {"live": live_request(spec, **ARGS)}
    for number, setting in enumerate(SETTINGS):
        requests[f"cold-{number}"] = cold_request(spec, setting, folder / f"cold-{number}", **ARGS)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack, ThreadPoolExecutor() as pool:
        patch.setattr(gpu, "wait_for_memory", lambda before: {})  # the other engines keep theirs

        def start(name):
            worker = stack.enter_context(Worker("tests.real_engines:TopLogprobs", folder / f"{name}.log"))
            return pool.submit(lambda: worker.ask(requests[name], Loaded, LOAD_S) and worker)

        live, *cold = [started.result() for started in [start(name) for name in requests]]
        yield live, cold


def long_texts(draw):
    """Texts that are longer than every window: of random tokens, as the weights are."""
    words = [tuple(draw.randrange(3, 262144) for _ in range(900)) for _ in range(8)]
    prompts = [Prompt(f"p{i}", "tune", text) for i, text in enumerate(words)]
    return prompts, [Record(f"r{i}", "gate", text[:400], text[400:]) for i, text in enumerate(words[:4])]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_live_equals_cold(shape, number):
    live, cold = shape
    setting = SETTINGS[number]
    prompts, records = long_texts(random.Random(0))
    require_equal(live, cold[number], setting, prompts, records, tokens=256)

    def shown(worker):
        """Per generated token its 20 largest log-probabilities, and those of each record's tokens in all."""
        return [x for prompt in prompts[:4] for x in decode(worker, prompt, 32, show=True).gaps]

    ours, theirs = shown(live), shown(cold[number])
    assert len(ours) == len(theirs) == 4 * 32 * 20
    largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"largest difference of {len(ours)} log-probabilities: {largest:.2e}")
    assert largest <= SAME_LOGPROB
    other = SETTINGS[(number + 2) % 4]
    apply(live, other, prompts[0])
    moved = max(abs(a - b) for a, b in zip(ours, shown(live), strict=True))
    print(f"they move by {moved:.2e} at {other}")
    assert moved > 10 * SAME_LOGPROB  # so that a window that did not act would be seen


def test_going_back_gives_the_first_values_bit_for_bit_and_takes_no_more_memory(tmp_path):
    """On trained weights: there a cold engine, which compiles anew, may land on other roundings than a live one."""
    spec = read_study(MINIATURE)
    prompt, record = spec.prompts()[1], spec.records()[0]
    with Worker("vllm", tmp_path / "worker.log") as live:
        live.ask(live_request(spec, **ARGS), Loaded, LOAD_S)

        def measure(setting):
            apply(live, setting, prompt)
            return score(live, record), decode(live, prompt).output_hash

        small, large = {WINDOW: 256, TOP_K: 4, DRAFTS: 2}, {WINDOW: 64, TOP_K: 4, DRAFTS: 10}
        first, used = measure(small), []
        for _ in range(20):
            assert measure(large) != first
            assert measure(small) == first
            used.append(sum(gpu.memory_used().values()) >> 20)
        print(f"\nMiB in use over 40 changes of all knobs: {used}")
        assert used[-1] - used[4] <= 64
