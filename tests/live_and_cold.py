"""One engine whose knobs are set live, held against engines that stock vLLM builds for one setting each."""

import math
import statistics
from pathlib import Path

import pytest

from search.engine.protocol import Applied, Apply, Decode, Decoded, Load, Score, Scored
from search.knobs import DRAFTS, TOP_K, WINDOW
from search.modelfiles import read_config
from search.serving import derive_drafter

LOAD_S, ANSWER_S = 600.0, 120.0
SAME_NLL = 1e-6  # nats a token
SAME_SPEED = 0.04  # of the cold engine's, beyond what the prompts leave open
LEAST_ROUNDS, MOST_ROUNDS = 2, 10


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


def compare_speed(live, cold, prompts, tokens):
    """Decode in both engines, require the same tokens and drafts, and compare the speeds.

    Whatever else a machine does only adds time, so each prompt counts by its fastest pass in each engine. The engines
    take turns in going first. As long as the two are apart there is another round: a disturbance passes, a slower
    engine stays slower. Returns the live engine's speed relative to the cold one's, and its standard error.
    """
    engines = {"live": live, "cold": cold}
    fastest = {(name, prompt.id): math.inf for name in engines for prompt in prompts}
    for turn in range(MOST_ROUNDS):
        for number, prompt in enumerate(prompts):
            order = ("live", "cold") if (turn + number) % 2 else ("cold", "live")
            found = {name: decode(engines[name], prompt, tokens) for name in order}
            a, b = found["live"], found["cold"]
            assert a.output_hash == b.output_hash
            assert (a.drafts, a.draft_tokens) == (b.drafts, b.draft_tokens)
            assert sum(a.accepted_per_pos) == sum(b.accepted_per_pos)
            for name, decoded in found.items():
                fastest[name, prompt.id] = min(fastest[name, prompt.id], decoded.latency_s)
        ratios = [fastest["cold", prompt.id] / fastest["live", prompt.id] for prompt in prompts]
        ratio = statistics.geometric_mean(ratios)
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        if turn + 1 >= LEAST_ROUNDS and abs(ratio - 1) < SAME_SPEED + error:
            break
    return ratio, error


def require_equal(live, cold, setting, prompts, records, tokens=48):
    """Set the live engine to `setting` and require knobs, perplexity, tokens, drafts and speed of the cold one.

    Returns the live engine's speed relative to the cold one's, and twice its standard error.
    """
    found = apply(cold, {}, prompts[0]).effective
    assert found == (setting if setting[DRAFTS] else {k: v for k, v in setting.items() if k != TOP_K})
    assert apply(live, setting, prompts[0]).effective == setting
    for record in records:
        difference = (score(live, record) - score(cold, record)) / len(record.target)
        assert difference == pytest.approx(0, abs=SAME_NLL)
    ratio, error = compare_speed(live, cold, prompts, tokens)
    print(f"\n{setting}: live ÷ cold TPS {ratio:.3f} ± {2 * error:.3f} over {len(prompts)} prompts")
    assert abs(ratio - 1) < SAME_SPEED + 3 * error
    return ratio, 2 * error
