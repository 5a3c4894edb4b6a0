from search.knobs import Knob, canonical, quality_part, words

NATIVE = {"sliding_window": 512, "centroid_top_k": 32, "num_speculative_tokens": 0}


def test_without_drafts_all_top_ks_are_one_setting():
    first = canonical({"sliding_window": 64, "centroid_top_k": 8, "num_speculative_tokens": 0}, NATIVE)
    second = canonical({"num_speculative_tokens": 0, "sliding_window": 64, "centroid_top_k": 99}, NATIVE)
    assert first == second == {"sliding_window": 64, "centroid_top_k": 32, "num_speculative_tokens": 0}


def test_with_drafts_top_k_counts():
    assert canonical({"centroid_top_k": 8, "num_speculative_tokens": 1}, NATIVE)["centroid_top_k"] == 8


def test_perplexity_hangs_on_the_window_alone():
    assert quality_part(NATIVE) == {"sliding_window": 512}


def test_values_stay_on_the_grid_of_a_stepped_range():
    knob = Knob("sliding_window", low=20, high=100, step=32)
    assert knob.largest == 84
    assert [knob.nearest(v) for v in (0, 35, 37, 1000)] == [20, 20, 52, 84]


def test_a_setting_in_words():
    assert words(NATIVE) == "window 512, top-k 32, K 0"
