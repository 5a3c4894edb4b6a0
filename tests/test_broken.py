"""Models and figures that are broken although everything ran."""

import pytest

from search import broken
from search.engine.protocol import Decoded, Loaded
from search.identity import distinct_4grams
from search.stages.throughput import impossible


def test_worse_than_guessing_is_said_to_be():
    assert broken.senseless_perplexity(2.39, 262_144) is None
    assert "899,234 is worse than guessing" in broken.senseless_perplexity(899_234.0, 262_144)


def test_a_drafter_that_knows_nothing_is_said_to_be():
    assert broken.useless_drafter([0.729, 0.554]) is None
    assert broken.useless_drafter([]) is None  # decoding without drafts
    assert "0.2% of the first drafts" in broken.useless_drafter([0.002, 0.0])


def test_outputs_that_repeat_themselves_are_said_to_loop():
    varied = distinct_4grams([17 * i % 251 for i in range(64)])
    looping = distinct_4grams([1, 2, 3, 4] * 16)
    assert broken.looping_output(varied, varied) is None
    assert "its outputs loop: 7% of their 4-grams" in broken.looping_output(looping, varied)


@pytest.mark.parametrize(("bandwidth", "possible"), [(600e9, True), (300e9, False), (None, True)])
def test_a_speed_that_no_memory_can_deliver_is_impossible(bandwidth, possible):
    # 64 tokens, 32 of them accepted drafts: 32 steps over 8 GB of weights in half a second need 512 GB/s.
    decoded = Decoded(
        prompt_id="p",
        tokens=64,
        latency_s=0.5,
        output_hash="",
        drafts=32,
        draft_tokens=64,
        accepted_per_pos=[20, 12],
        distinct_4grams=1.0,
    )
    engine = Loaded(
        native={},
        vocabulary=100,
        model_hash="",
        drafter_hash=None,
        build_hash="",
        environment={},
        start_s=0.0,
        step_bytes=8_000_000_000,
        bandwidth=bandwidth,
    )
    assert (impossible(decoded, 64, 2, engine) is None) == possible
    if not possible:
        assert "64 steps a second over 8.00 GB of weights" in impossible(decoded, 64, 2, engine)
