import random

import pytest

from search.identity import NEAR_TIE, Plain, compare_tokens, degenerate, variety


def test_a_near_tie_is_told_from_a_bug():
    plain = {
        "same": Plain([1, 2, 3], [5.0, 5.0, 5.0]),
        "tie": Plain([1, 2, 3], [5.0, NEAR_TIE / 2, 5.0]),
        "bug": Plain([1, 2, 3], [5.0, 5.0, 2.0]),
    }
    found = compare_tokens(plain, {"same": [1, 2, 3], "tie": [1, 9, 9], "bug": [1, 2, 9], "not measured": [1]})
    assert found.prompts == 3 and found.rate == pytest.approx(1 / 3)
    assert [(d.prompt, d.position, d.gap) for d in found.unexplained] == [("bug", 2, 2.0)]
    assert found.as_json()["first_divergence"]["prompt"] == "tie"
    assert found.as_json()["near_ties"] == 1


def test_no_common_prompt_is_no_identity():
    with pytest.raises(ValueError, match="no prompt"):
        compare_tokens({"a": Plain([1], [1.0])}, {"b": [1]})


def test_an_output_that_loops_is_degenerate_and_another_text_is_not():
    draw = random.Random(0)
    texts = [{f"p{i}": [draw.randrange(4096) for _ in range(64)] for i in range(8)} for _ in range(2)]
    loops = {p: [7, 8, 9] * 20 + [7, 8, 9, 7] for p in texts[0]}
    reference = variety(texts[0])
    assert degenerate(variety(loops), reference)
    assert not degenerate(variety(texts[1]), reference)
    # Half of the outputs looping is enough.
    assert degenerate(variety({p: loops[p] if i % 2 else t for i, (p, t) in enumerate(texts[1].items())}), reference)
