"""What a search found, in a few lines: how trials ended, what is best, what to type next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from search.knobs import NO_DRAFTS, words
from search.objectives import DEFAULT, MORE, OBJECTIVES, listed, value
from search.store import Outcome
from search.summary import Summary


def verdict(outcome: Outcome, objectives: Sequence[str] = DEFAULT) -> str:
    """A finished trial in a few words, with the figures that its study's front is made of."""
    text = words(outcome.setting)
    if outcome.state == "PRUNED":
        text += f": pruned, {outcome.reason}"
    elif outcome.state == "COMPLETE":
        more = [OBJECTIVES[name].shown(value(outcome, name)) for name in objectives if name in MORE]
        text += ": " + ", ".join([f"{outcome.tps:.1f} tok/s", f"perplexity {outcome.ppl:.4f}", *more])
    else:
        text += f": failed ({outcome.reason})"
    if outcome.warning:
        text += f"; WARNING: {outcome.warning}"
    return text + (f" (as in trial {outcome.reused_from})" if outcome.reused_from is not None else "")


def found(summary: Summary) -> list[str]:
    """How the trials ended, what is wrong with the model if something is, and the fastest that passed the gate."""
    counts, best, reference = summary.counts, summary.best, summary.reference
    lines = [
        f"{counts['complete'] + counts['pruned']} trials stand finished ({summary.wall_s:.0f} s in this run): "
        f"{counts['complete']} passed the gate, {counts['pruned']} were pruned over the ceiling of "
        f"{summary.ceiling:.4f}{_others(summary)}; {summary.reused} were known settings, {counts['failed']} more "
        "failed."
    ]
    if summary.warnings:
        first, more = summary.warnings[0], len(summary.warnings) - 1
        others = f" ({more} more trials have warnings)" if more else ""
        lines.append(f"WARNING, trial {first['trial']}: {first['warning']}{others}.")
    if best is None:
        return [*lines, "No setting passed the gate: there is no best trial. Raise the ceiling, or widen the ranges."]
    assert reference.tps is not None
    marked = "SIMULATED " if summary.simulated else ""
    return [
        *lines,
        f"{marked}{_of_front(summary)}: trial {best['trial']} ({words(best['knobs'])}): "
        f"{best['tps']:.1f} tok/s [{best['tps_low']:.1f}, {best['tps_high']:.1f}], "
        f"{best['tps'] / reference.tps:.2f} × the reference's {reference.tps:.1f}; perplexity {best['ppl']:.4f} "
        f"(reference {reference.ppl:.4f}).",
        *_more(best),
        *_best_in_others(summary),
        *_methods(summary),
        *_cards(summary),
    ]


def _others(summary: Summary) -> str:
    """How many the gates beside perplexity refused, where there are such."""
    refused = {name: gate["refused"] for name, gate in summary.gates.items() if name != "ppl"}
    counts = ", ".join(f"{name} {count}" for name, count in refused.items())
    return f" or by another gate ({counts})" if refused else ""


def _of_front(summary: Summary) -> str:
    """What the best is the best of."""
    if summary.objectives == DEFAULT:
        return f"Best of a front of {len(summary.front)}"
    return f"Fastest of a front of {len(summary.front)} ({listed(summary.objectives)})"


def _best_in_others(summary: Summary) -> list[str]:
    """Who is best in each of the other objectives, where the front is not made of TPS and perplexity."""
    if summary.objectives == DEFAULT:
        return []
    lines = []
    for name in summary.objectives:
        if name == "tps":
            continue
        least, objective = min(summary.front, key=lambda point: point[name]), OBJECTIVES[name]
        lines.append(
            f"Least {objective.words}: trial {least['trial']} ({words(least['knobs'])}): "
            f"{objective.shown(least[name])}, {least['tps']:.1f} tok/s "
            f"(reference: {objective.shown(value(summary.reference, name))})."
        )
    return lines


def _more(best: Mapping[str, Any]) -> list[str]:
    """What else was measured while the best was timed."""
    words = [OBJECTIVES[name].shown(best[name]) for name in MORE if best.get(name) is not None]
    return [f"There: {'; '.join(words)}."] if words else []


def _methods(summary: Summary) -> list[str]:
    """How methods of speculation compare, where several were searched; one that does not pay is said to."""
    if len(summary.methods) < 2:
        return []
    plain = max(summary.methods.get(NO_DRAFTS, 0.0), summary.reference.tps or 0.0)
    ranked = sorted(summary.methods.items(), key=lambda item: -item[1])
    lost = [method for method, tps in ranked if method != NO_DRAFTS and tps <= plain]
    lines = ["The fastest with each method: " + ", ".join(f"{method} {tps:.1f} tok/s" for method, tps in ranked) + "."]
    if lost:
        lines.append(
            f"{' and '.join(lost)} lose{'s' * (len(lost) == 1)} to decoding without drafts ({plain:.1f} tok/s)."
        )
    return lines


def _cards(summary: Summary) -> list[str]:
    """Where the trials were measured, if it was in more than one place."""
    if len(summary.cards) < 2:
        return []
    assert summary.best is not None
    trials = ", ".join(f"{card}: {count}" for card, count in sorted(summary.cards.items()))
    return [
        f"Trials by card: {trials}; tok/s are on the scale of {summary.reference.card}, where the study began. "
        f"The best was measured on {summary.best['card']}."
    ]


def next_steps(summary: Summary, where: str) -> list[str]:
    """What confirming found, and what to type next.

    Args:
        summary: what the search found.
        where: arguments that name the study and its database, each with a space before it, or nothing.
    """
    review = f"See it: python -m search.report{where}"
    export = f"python -m search.export{where} --out manifest"
    if summary.best is None or summary.simulated:
        return [review]
    if not summary.confirmed:
        return [
            f"Next: run it again with --confirm 3, which is what makes a figure a claim; or {export} --unverified",
            review,
        ]
    winner = summary.winner
    if winner is None:
        return ["No finalist was borne out when it was measured again; nothing can be claimed.", review]
    on = "held-out prompts" if winner.figures.get("held_out_tps") else "the search's own prompts, as none are held out"
    return [
        f"Winner: trial {winner.trial} ({words(winner.setting)}), served: {winner.mean:.1f} tok/s on {on} "
        f"[{winner.low:.1f}, {winner.high:.1f}]. It may claim {winner.claimed:.1f}: a re-run is at most 5 % below that "
        f"with a chance of {winner.p_pass:.1%}.",
        f"Next: {export}",
        review,
    ]
