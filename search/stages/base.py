"""What all stages share: who is told, how knobs are applied, what a row of the store looks like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from search.agreement import pack
from search.data import Prompt, Record
from search.engine.protocol import Applied, Apply, Score, Scored, Setting
from search.engine.session import EngineSession
from search.gate import RecordScore
from search.knobs import words
from search.store import Measurement, Store

PROBE_TOKENS = 24  # decoded after every change: warms up, and lets K be counted


class Observer(Protocol):
    """Who is told what goes on."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def stage(self, trial: int, setting: Mapping[str, Any], stage: str, done: int, total: int) -> None:
        """A stage of a trial went on by one step."""


class Stage:
    """One kind of measurement of a study's trials, made in `session` and kept in `store`."""

    def __init__(self, session: EngineSession, store: Store, observer: Observer) -> None:
        self._session = session
        self._store = store
        self._observer = observer

    def _row(
        self,
        trial: int,
        stage: str,
        status: str,
        setting: Setting,
        effective: Setting,
        figures: dict[str, Any],
        wall_s: float,
    ) -> Measurement:
        return Measurement(
            study=self._store.study,
            trial=trial,
            environment_id=self._session.environment_id,
            stage=stage,
            status=status,
            setting=dict(setting),
            effective=dict(effective),
            figures=figures,
            wall_s=wall_s,
        )


def score(session: EngineSession, record: Record, top: int = 0) -> RecordScore:
    """Score one record; with its distributions over the `top` likeliest tokens, unless that is 0.

    Raises:
        WorkerError: another number of tokens was scored than its target has.
    """
    request = Score(record=record.id, context=list(record.context), target=list(record.target), top=top)
    found = session.ask(request, Scored)
    if found.tokens != len(record.target):
        reason = f"record {record.id}: {found.tokens} tokens scored of {len(record.target)}"
        raise session.refuse("impossible-figure", reason)
    if not top:
        return RecordScore(found.nll, found.tokens)
    pairs = zip(found.top_ids, found.top_logprobs, strict=False)
    shown = [dict(zip(ids, values, strict=False)) for ids, values in pairs]
    if len(shown) != found.tokens or not all(shown):
        reason = f"record {record.id}: the likeliest tokens in place of some target tokens are missing"
        raise session.refuse("impossible-figure", reason)
    return RecordScore(found.nll, found.tokens, distributions=pack(shown))


def apply(session: EngineSession, setting: Setting, probe: Prompt | None = None) -> Setting:
    """Put the live knobs to `setting`, which the engine is built for; returns what was read back, then and now.

    With a `probe` some tokens are decoded after it, so that K is counted and the next prompt finds a warm engine;
    without one K goes unchecked here (it shows in every prompt that is timed).

    Raises:
        WorkerError: a knob does not act as it was asked to.
    """
    build = session.build
    assert {name: setting.get(name) for name in build} == build, "another engine is needed for this setting"
    live = {name: value for name, value in setting.items() if name not in build}
    tokens = list(probe.token_ids) if probe else []
    applied = session.ask(Apply(setting=live, probe=tokens, probe_tokens=PROBE_TOKENS if probe else 0), Applied)
    acting = {name: applied.effective.get(name, "nothing" if probe else value) for name, value in live.items()}
    if acting != live:
        raise session.refuse("mismatch", f"asked for {words(setting)}, but the engine runs {words(acting)}")
    return {**applied.effective, **build}
