"""Confirm: the fastest points of the front are measured again, served, as whoever deploys them will have them.

Each finalist is exported and served in a fresh process, and asked over HTTP: held-out prompts that the search never
saw, repeated until the mean is narrow; held-out records; and its tokens against the same model and window decoding
without drafts. Whoever leads is served in a second process before it wins. Claims rest on these figures alone.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from search import gate, served
from search.agreement import TOP
from search.claim import TOLERANCE, claim
from search.data import Prompt
from search.endpoint import Endpoint, EndpointError
from search.engine.process import WorkerError
from search.engine.protocol import Setting
from search.errors import SearchError
from search.gates import Finding
from search.identity import Identity, Plain, compare_tokens, degenerate, variety
from search.knobs import DRAFTS, drafts_as_asked, quality_part, words
from search.manifest import build_manifest, write_manifest
from search.objectives import DEFAULT, losses
from search.pace import elasticity
from search.spec import StudySpec
from search.stages import Observer
from search.store import REFERENCE, Confirmation, FrontPoint, Outcome, Store, setting_key
from search.trial import Laboratory

PROCESSES = 2  # that whoever leads must have been served in before it wins


@dataclass(frozen=True)
class PlainEvidence:
    """What the model says without drafts on one card: at the reference setting, and at each finalist's window."""

    reference: dict[str, Plain]
    by_trial: dict[int, dict[str, Plain]]
    held_out_scores: dict[str, gate.RecordScore]
    card: str | None


def finalists(store: Store, count: int) -> list[Outcome]:
    """The fastest points of the front and, where it has fewer, the fastest other settings that passed the gate.

    Of a front of other objectives than TPS and perplexity the fastest, then the best in each of the others.
    """
    outcomes = {outcome.trial: outcome for outcome in store.outcomes()}
    front = [outcomes[point.trial] for point in _in_order(store.front(), store.objectives())]
    others = sorted((o for o in outcomes.values() if o.state == "COMPLETE"), key=lambda o: -(o.tps or 0.0))
    chosen: dict[str, Outcome] = {}
    for outcome in [*front, *others]:
        if outcome.reused_from is None and len(chosen) < count:
            chosen.setdefault(outcome.setting_key, outcome)
    return list(chosen.values())


def _in_order(front: Sequence[FrontPoint], objectives: Sequence[str]) -> list[FrontPoint]:
    """A front, slowest first, in the order in which its points become finalists; some stand there twice."""
    fastest = list(reversed(front))
    if objectives == DEFAULT or not front:
        return fastest
    best = [min(fastest, key=lambda point: losses(point, [name]) or (math.inf,)) for name in objectives]
    return [*fastest[:1], *best, *fastest]


def confirm(
    spec: StudySpec, store: Store, laboratory: Laboratory, observer: Observer, count: int, logs: Path
) -> list[Confirmation]:
    """Confirm `count` finalists; those already confirmed on this card are not measured again.

    Returns all, the winner first.

    A finalist whose server failed is tried again when the search is.

    Raises:
        SearchError: the engine does not start, or does not decode without drafts.
    """
    chosen = finalists(store, count)
    missing: list[Outcome] = []
    if not _settled(store, chosen):  # else it does not matter which card this is
        running = _in_the_running(store, chosen)
        missing = [outcome for outcome in running if not _complete(store.confirmation(outcome.trial), laboratory.card)]
    if missing:
        observer.note(f"Confirming {len(missing)} finalists: each is served in a process of its own.")
        try:
            evidence = laboratory.insist("Plain decoding", lambda: _plain_evidence(spec, store, laboratory, missing))
        except WorkerError as error:
            raise SearchError(f"The finalists cannot be confirmed: plain decoding failed: {error}") from error
        laboratory.end_worker()  # two engines at once would slow each other
        for outcome in missing:
            store.add_confirmation(_confirmation(spec, store, outcome, evidence, observer, logs))
            _claim_anew(spec, store)
    while (leader := store.winner()) is not None and len(leader.figures["processes"]) < PROCESSES:
        laboratory.end_worker()
        store.add_confirmation(_served_again(spec, store, leader, observer, logs))
        _claim_anew(spec, store)
        if again := store.confirmation(leader.trial):
            observer.note(f"Served trial {leader.trial} again: {_verdict(again)}")
    return store.confirmations()


def _settled(store: Store, chosen: Sequence[Outcome]) -> bool:
    """Whether nothing is left to measure: every finalist is confirmed, and whoever leads was served often enough."""
    leader = store.winner()
    return all(_complete(store.confirmation(outcome.trial)) for outcome in chosen) and (
        leader is None or len(leader.figures["processes"]) >= PROCESSES
    )


def _in_the_running(store: Store, chosen: Sequence[Outcome]) -> list[Outcome]:
    """The finalists, and others that may still win: a claim on one card is not held against one on another."""
    known = {outcome.trial for outcome in chosen}
    earlier = [c.trial for c in store.confirmations() if c.eligible and c.trial not in known]
    return [*chosen, *filter(None, map(store.outcome, earlier))]


def _complete(found: Confirmation | None, card: str | None = None) -> bool:
    """Whether a finalist was measured to the end; its server may have failed, or an earlier release measured less.

    With a `card`: on that one, or before cards were told apart.
    """
    if found is None or "pace_elasticity" not in found.figures:
        return False
    return card is None or found.figures.get("card") in (None, card)


def _plain_evidence(
    spec: StudySpec, store: Store, laboratory: Laboratory, outcomes: Sequence[Outcome]
) -> PlainEvidence:
    """Everything about plain decoding that the finalists are held against, on the search's own engine."""
    prompts = [*spec.held_out_prompts(), *spec.prompts()]
    measured = store.outcome(REFERENCE)
    assert measured is not None
    reference: Setting = dict(measured.setting)
    settings = {o.trial: {**reference, **quality_part(o.setting, spec.of_speed)} for o in outcomes}
    tokens: dict[str, dict[str, Plain]] = {}
    for setting in [reference, *settings.values()]:
        if setting_key(setting) not in tokens:
            tokens[setting_key(setting)] = laboratory.plain.tokens(setting, prompts, spec.workload.output_tokens)
    return PlainEvidence(
        reference=tokens[setting_key(reference)],
        by_trial={trial: tokens[setting_key(setting)] for trial, setting in settings.items()},
        held_out_scores=laboratory.plain.scores(reference, spec.held_out_records()),
        card=laboratory.card,
    )


def _confirmation(
    spec: StudySpec, store: Store, outcome: Outcome, evidence: PlainEvidence, observer: Observer, logs: Path
) -> Confirmation:
    """Serve one finalist and measure it; a server that fails makes a finalist that does not win."""
    try:
        with _serving(spec, store, outcome, observer, logs / f"confirm-{outcome.trial}.log") as (endpoint, tell):
            found = _measure(spec, store, outcome, evidence, endpoint, tell)
    except EndpointError as error:
        found = Confirmation(eligible=False, reason=str(error)[:1000], figures={})
    found.study, found.trial, found.setting = store.study, outcome.trial, dict(outcome.setting)
    observer.note(f"Confirmed trial {outcome.trial}: {_verdict(found)}")
    return found


def _verdict(found: Confirmation) -> str:
    if not found.eligible:
        return f"does not win: {found.reason}"
    count = len(found.figures["processes"])
    return f"claims {found.claimed:.1f} tok/s" + (f" from {count} processes" if count > 1 else "")


def _served_again(spec: StudySpec, store: Store, leader: Confirmation, observer: Observer, logs: Path) -> Confirmation:
    """Serve a confirmed trial in one more process, and let its claim rest on all of them."""
    outcome = store.outcome(leader.trial)
    assert outcome is not None
    prompts = spec.held_out_prompts() or spec.prompts()
    tokens, concurrency = spec.workload.output_tokens, spec.workload.concurrency
    try:
        with _serving(spec, store, outcome, observer, logs / f"confirm-{leader.trial}-again.log") as (endpoint, tell):
            speed = served.time_prompts(endpoint, prompts, tokens, tell, concurrency=concurrency)
    except EndpointError as error:
        leader.eligible, leader.reason, leader.figures = False, str(error)[:1000], {}
        return leader
    same = sum(leader.figures["tokens"][p] == tokens for p, tokens in speed.tokens.items()) / len(speed.tokens)
    processes = [*leader.figures["processes"], _timed(speed)]
    leader.figures = {**leader.figures, "processes": processes, "same_tokens_again": same}
    return leader


def _timed(speed: served.Served) -> dict[str, Any]:
    """What the store keeps of a process's passes."""
    return {"passes": speed.passes, "machine_s": speed.machine_s}


def _again(timed: Mapping[str, Any]) -> served.Served:
    return served.Served(passes=timed["passes"], machine_s=timed["machine_s"])


def _claim_anew(spec: StudySpec, store: Store) -> None:
    """Let every finalist's claim rest on all that is known of the machine.

    How throughput follows the pace is estimated from the passes of all of them.
    """
    found = [confirmation for confirmation in store.confirmations() if _complete(confirmation)]
    slope = elasticity([_again(timed).paces for c in found for timed in c.figures["processes"]])
    for confirmation in found:
        _claim_at(confirmation, slope, spec.workload.wave_tokens)
        store.add_confirmation(confirmation)


def _claim_at(confirmation: Confirmation, slope: float, tokens: int) -> None:
    """Fill in a confirmation's claim, and how its tune prompts compare, at the pace of its own processes.

    `tokens` are what each timed prompt or wave generates.
    """
    processes = [_again(timed) for timed in confirmation.figures["processes"]]
    machine_s = statistics.geometric_mean([process.pace_s for process in processes])
    promise = claim([process.at(machine_s, slope) for process in processes], tokens)
    for name in ("claimed", "mean", "low", "high", "p_pass"):
        setattr(confirmation, name, getattr(promise, name))
    of_pace = {"machine_s": machine_s, "pace_elasticity": slope, "p_pass_new_prompts": promise.p_pass_new_prompts}
    gap: dict[str, float | None] = {"tune_tps": promise.mean, "held_out_tps": None, "gap": None, "least_gap": None}
    if confirmation.figures["tune"] is not None:
        (tune,) = _again(confirmation.figures["tune"]).at(machine_s, slope)
        fall, least_fall = served.fall(tune, processes[0].at(machine_s, slope))
        gap = {"tune_tps": served.tps(tune, tokens), "held_out_tps": promise.mean, "gap": fall, "least_gap": least_fall}
    confirmation.figures = {**confirmation.figures, **of_pace, **gap}


@contextmanager
def _serving(
    spec: StudySpec, store: Store, outcome: Outcome, observer: Observer, log: Path
) -> Iterator[tuple[Endpoint, served.Tell]]:
    """A trial exported and served, as whoever deploys it will; with whom to tell how measuring goes."""

    def tell(what: str, done: int, total: int) -> None:
        observer.stage(outcome.trial, outcome.setting, f"confirm: {what}", done, total)

    observer.note(f"Serving trial {outcome.trial} ({words(outcome.setting)}) …")
    tell("starting the server", 0, 1)
    with tempfile.TemporaryDirectory(prefix="vllm-pareto-") as scratch:
        folder = Path(scratch) / "manifest"
        write_manifest(build_manifest(spec, store, outcome), spec, folder)
        with Endpoint(folder, log, spec.limits, store) as endpoint:
            yield endpoint, tell


def _measure(
    spec: StudySpec, store: Store, outcome: Outcome, evidence: PlainEvidence, endpoint: Endpoint, tell: served.Tell
) -> Confirmation:
    tokens, held_out, tune = spec.workload.output_tokens, spec.held_out_prompts(), spec.prompts()
    reference = store.outcome(REFERENCE)
    assert reference is not None and reference.ppl is not None and outcome.ceiling is not None
    effective = endpoint.effective()
    claimed_on: list[Prompt] = held_out or tune
    timed = partial(served.time_prompts, endpoint, concurrency=spec.workload.concurrency)
    speed = timed(claimed_on, tokens, tell)
    of_tune = timed(tune, tokens, tell, probe=claimed_on[0], once=True) if held_out else None
    outputs = {**speed.tokens, **(of_tune.tokens if of_tune else {})}
    top = TOP if spec.gate.agreement is not None else 0
    gate_scores = served.score_records(endpoint, spec.records(), tell, top)
    held_scores = served.score_records(endpoint, spec.held_out_records(), tell)
    others = _other_gates(spec, store, outcome, endpoint, gate_scores, tell)
    shift = served.path_shift(endpoint, claimed_on, tokens)
    identity = compare_tokens(evidence.by_trial[outcome.trial], outputs)
    ppl = gate.perplexity(gate_scores.values())
    held_out_ratio = (
        gate.perplexity(held_scores.values()) / gate.perplexity(evidence.held_out_scores.values())
        if held_scores
        else None
    )
    mine, theirs = variety(outputs), variety({p: plain.token_ids for p, plain in evidence.reference.items()})
    found = Confirmation(
        figures={
            "ppl": ppl,
            "held_out_ratio": held_out_ratio,
            "gates": {finding.gate: finding.figure for finding in others},
            "identity": identity.as_json(),
            "self_shift": shift,
            "stable": speed.stable,
            "variety": {"distinct_4grams": mine.distinct_4grams, "compression": mine.compression},
            "reference_variety": {"distinct_4grams": theirs.distinct_4grams, "compression": theirs.compression},
            "processes": [_timed(speed)],
            "tune": _timed(of_tune) if of_tune else None,
            "effective": effective,
            "tokens": dict(sorted(outputs.items())),
            "card": evidence.card,
        }
    )
    _claim_at(found, elasticity([speed.paces]), spec.workload.wave_tokens)
    found.reason = _objection(
        outcome,
        effective,
        speed,
        ppl,
        others,
        held_out_ratio,
        reference.ppl,
        found.figures["least_gap"],
        identity,
        shift,
        spec.resolved(outcome.setting).method,
    ) or ("its outputs loop where the reference's do not" if degenerate(mine, theirs) else None)
    found.eligible = found.reason is None
    return found


def _other_gates(
    spec: StudySpec,
    store: Store,
    outcome: Outcome,
    endpoint: Endpoint,
    scores: Mapping[str, gate.RecordScore],
    tell: served.Tell,
) -> list[Finding]:
    """What the gates beside perplexity say of the served folder, held against the limits that the trial passed."""
    limits = {name: found["limit"] for name, found in (outcome.gates or {}).items()}
    found = []
    if spec.gate.agreement is not None:
        found += served.agreement_gates(store.reference_distributions(), scores, limits)
    if (asked := spec.gate.tasks) is not None:
        found.append(served.task_gate(endpoint, spec.tasks(), asked.max_tokens, asked.stop, limits["exact"], tell))
    return found


def _objection(
    outcome: Outcome,
    effective: Mapping[str, Any],
    speed: served.Served,
    ppl: float,
    others: Sequence[Finding],
    held_out_ratio: float | None,
    reference_ppl: float,
    least_fall: float | None,
    identity: Identity,
    shift: float,
    method: str,
) -> str | None:
    """Why a finalist must not win, or None."""
    assert outcome.ceiling is not None
    drafts = outcome.setting.get(DRAFTS, 0)
    asked = {k: v for k, v in outcome.setting.items() if k in effective}
    if any(effective[k] != v for k, v in asked.items()) or not drafts_as_asked(speed.drafts_a_step, drafts, method):
        return f"served, it runs {dict(effective)} with {speed.drafts_a_step:g} drafts a step"
    if ppl > outcome.ceiling:
        return f"served, its perplexity is {ppl:.4f}, over the ceiling of {outcome.ceiling:.4f}"
    for finding in others:
        if finding.outcome == "over":
            return f"served, {finding.reason}"
    allowed = outcome.ceiling / reference_ppl
    if held_out_ratio is not None and held_out_ratio > allowed:
        return f"on held-out records its perplexity is {held_out_ratio:.4f} × the reference's, over {allowed:.4f}"
    if least_fall is not None and least_fall > TOLERANCE:
        return f"on held-out prompts it is slower than on tune prompts by at least {least_fall:.1%}"
    if identity.unexplained:
        first = identity.unexplained[0]
        return (
            f"{len(identity.unexplained)} of {identity.prompts} prompts leave plain greedy decoding, the first at "
            f"token {first.position} of {first.prompt} against a lead of {first.gap:.2f} nats"
        )
    if shift > served.SELF_SHIFT:
        return f"the tokens it generates are {shift:.3f} nats a token less or more likely when scored than when served"
    return None
