"""One engine whose knobs are set live, held against engines that stock vLLM builds for one setting each."""

import statistics
from pathlib import Path

import pytest

from search.engine.protocol import Applied, Apply, Decode, Decoded, Load, Score, Scored
from search.knobs import DRAFTS, TOP_K, WINDOW
from search.modelfiles import read_config
from search.serving import derive_drafter

LOAD_S, ANSWER_S = 600.0, 120.0
SAME_NLL = 1e-6  # nats a token


def live_request(spec, **args):
    """An engine built with the largest values of all knobs."""
    limits = {knob.name: knob.largest for knob in spec.knobs}
    return Load(model=spec.engine.model, drafter=spec.engine.drafter, args=spec.engine.args | args, limits=limits)


def cold_request(spec, setting, folder, **args):
    """An engine that stock vLLM builds for one setting, from model folders whose configs say it."""
    folder.mkdir(parents=True, exist_ok=True)
    target = derive_drafter(Path(spec.engine.model), folder / "target", {WINDOW: setting[WINDOW]})
    values = {WINDOW: setting[WINDOW], TOP_K: setting[TOP_K]}
    drafter = derive_drafter(Path(spec.engine.drafter), folder / "drafter", values)
    assert read_config(target)["sliding_window"] == setting[WINDOW]
    limits = {DRAFTS: setting[DRAFTS]}
    return Load(model=str(target), drafter=str(drafter), args=spec.engine.args | args, limits=limits)


def apply(worker, setting, prompt):
    return worker.ask(Apply(setting=setting, probe=list(prompt.token_ids), probe_tokens=24), Applied, ANSWER_S)


def score(worker, record):
    request = Score(record=record.id, context=list(record.context), target=list(record.target))
    return worker.ask(request, Scored, ANSWER_S).nll


def decode(worker, prompt, tokens=48, *, show=False):
    request = Decode(prompt_id=prompt.id, prompt=list(prompt.token_ids), max_tokens=tokens, show_tokens=show)
    return worker.ask(request, Decoded, ANSWER_S)


def require_equal(live, cold, setting, prompts, records, tokens=48):
    """Set the live engine to `setting` and require knobs, perplexity, tokens, drafts and speed of the cold one.

    Prompts are decoded in turns, so that a drifting machine slows both alike. Returns the live engine's speed
    relative to the cold one's, and twice its standard error.
    """
    found = apply(cold, {}, prompts[0]).effective
    assert found == (setting if setting[DRAFTS] else {k: v for k, v in setting.items() if k != TOP_K})
    assert apply(live, setting, prompts[0]).effective == setting
    for record in records:
        difference = (score(live, record) - score(cold, record)) / len(record.target)
        assert difference == pytest.approx(0, abs=SAME_NLL)
    ratios = []
    for prompt in prompts:
        a, b = decode(live, prompt, tokens), decode(cold, prompt, tokens)
        assert a.output_hash == b.output_hash
        assert (a.drafts, a.draft_tokens) == (b.drafts, b.draft_tokens)
        assert sum(a.accepted_per_pos) == sum(b.accepted_per_pos)
        ratios.append(b.latency_s / a.latency_s)
    ratio = statistics.geometric_mean(ratios)
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    print(f"\n{setting}: live ÷ cold TPS {ratio:.3f} ± {2 * error:.3f} over {len(ratios)} prompts")
    assert abs(ratio - 1) < 0.04 + 3 * error
    return ratio, 2 * error
