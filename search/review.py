"""What Optuna Dashboard is shown of a study: the truth about what is feasible, notes, our own figure, and files.

Nothing is written: all of it is added to what the dashboard reads, so that it is as fresh as the study, and a search
that goes on is not disturbed. A note that a person wrote in the dashboard stays.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sized
from typing import Any

import pandas as pd
from optuna.storages import RDBStorage
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from search import gates
from search.attachments import Attachments, attachments
from search.errors import SearchError
from search.objectives import DEFAULT, MORE, OBJECTIVES, listed
from search.report.figures import front
from search.report.page import headline
from search.store import Store, engine_options, full_url, open_engine, study_names
from search.store.frames import Frames, frames

CONSTRAINTS = "constraints"  # the only place where Optuna Dashboard 0.21 looks for them


class ReviewStorage(RDBStorage):
    """A study database as the dashboard should see it."""

    def __init__(self, url: str) -> None:
        self._ours = open_engine(url, must_exist=True)
        super().__init__(full_url(url), engine_kwargs=engine_options(url))
        self._cache: dict[str, tuple[tuple[float | None, ...], dict[str, Any]]] = {}
        self.attachments = Attachments()

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """The trials, with their constraints where the dashboard finds them."""
        return [_with_constraints(trial) for trial in super().get_all_trials(study_id, deepcopy, states)]

    def get_all_studies(self) -> list[FrozenStudy]:
        """The studies; those of ours with notes and the feasible front."""
        studies = super().get_all_studies()
        known = set(study_names(self._ours))
        for study in studies:
            if study.study_name in known:
                study.system_attrs = {**self._additions(study._study_id, study.study_name), **study.system_attrs}
        return studies

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """A study's attributes, with what describes its artifacts."""
        stored = super().get_study_system_attrs(study_id)
        name = self.get_study_name_from_id(study_id)
        return {**self._additions(study_id, name), **stored} if name in study_names(self._ours) else stored

    def _additions(self, study_id: int, name: str) -> dict[str, Any]:
        store = Store(self._ours, name)
        confirmations = store.confirmations()
        rows: tuple[Sized, ...] = (store.outcomes(), confirmations, store.environments(), store.exports())
        state = (*map(len, rows), *(c.claimed for c in confirmations))
        if name not in self._cache or self._cache[name][0] != state:
            self._cache[name] = (state, self._made(study_id, store))
        return self._cache[name][1]

    def _made(self, study_id: int, store: Store) -> dict[str, Any]:
        try:
            found = frames(store)
        except SearchError:  # nothing has been measured yet
            return {}
        made = _note(None, study_note(found))
        trials = super().get_all_trials(study_id, deepcopy=False)
        ids = {trial.number: trial._trial_id for trial in trials}
        whys = {trial.number: str(trial.user_attrs.get("why", "")) for trial in trials}
        for row in found.trials.itertuples():
            if row.trial in ids:
                made |= _note(ids[row.trial], trial_note(row, found, whys[row.trial]))
        figure = front(found)
        if figure is not None:
            made["dashboard:plot_data:feasible-front:0"] = figure.plot.update_layout(title="Feasible front").to_json()
        for attachment in attachments(store):
            where = "artifacts:" if attachment.trial is None else f"dashboard:artifacts:{ids.get(attachment.trial)}:"
            made[where + attachment.id] = attachment.described
            self.attachments.by_id[attachment.id] = attachment
        return made


def study_note(study: Frames) -> str:
    """Markdown: what was searched, what was found, how to go on."""
    top, reference = headline(study), study.reference
    what = "Best" if study.objectives == DEFAULT else "Fastest"
    best = f"{what}: {top.who}, {top.tps:.1f} tok/s, perplexity {top.ppl:.4f} ({top.basis})." if top.tps else ""
    lines = [
        f"## {study.study}",
        "**SIMULATED: every figure is made up.**" if study.simulated else "",
        f"Ceiling: perplexity **{study.ceiling:.4f}**. Reference: {reference.tps:.1f} tok/s at {reference.ppl:.4f}.",
        gates.words(study.gates),
        "" if study.objectives == DEFAULT else f"The front is made of {listed(study.objectives)}.",
        best or "No setting has passed the gate.",
        "" if top.p_pass is None else f"A re-run is at most 5 % below that with a chance of {top.p_pass:.1%}.",
        "Export it: `python -m search.export` with this study and database." if top.p_pass is not None else "",
        "Trials that a gate refused are *pruned* and were not timed.",
    ]
    return "\n\n".join(line for line in lines if line)


def trial_note(row: Any, study: Frames, why: str = "") -> str:
    """Markdown: how a trial ended and why, with its interval, and why it was asked for."""
    knobs = study.trials.loc[row.trial, list(study.knobs)].dropna()
    setting = ", ".join(f"{name} {value}" for name, value in knobs.items())
    read_back = "asked for" if row.state == "FAIL" else "as read back from the engine"
    if row.state == "COMPLETE":
        end = (
            f"Passed the gate: perplexity {row.ppl:.4f} under {study.ceiling:.4f}. {row.tps:.1f} tok/s "
            f"[{row.tps_low:.1f}, {row.tps_high:.1f}]" + (", on the front." if row.on_front else ".")
        )
    elif row.state == "PRUNED":
        end = "Pruned:"
    else:
        end = f"Failed in {row.failed_stage or 'no stage'} ({row.failure or 'unknown'}):"
    beside = [OBJECTIVES[name].shown(getattr(row, name)) for name in MORE if pd.notna(getattr(row, name))]
    others = [f"{name} {getattr(row, name):.4f}" for name in gates.GATES[1:] if pd.notna(getattr(row, name, None))]
    reused = "" if pd.isna(row.reused_from) else f"As in trial {row.reused_from:.0f}."
    warning = f"**Warning:** {row.warning}." if isinstance(row.warning, str) else ""
    said = row.reason if isinstance(row.reason, str) else ""
    return "\n\n".join(
        line
        for line in (
            f"{end} {said}".strip(),
            f"Other gates, over what was looked at: {', '.join(others)}." if others else "",
            f"Beside its speed: {'; '.join(beside)}." if beside else "",
            f"Setting, {read_back}: {setting}.",
            f"Asked for: {why}." if why else "",
            reused,
            warning,
        )
        if line
    )


def _with_constraints(trial: FrozenTrial) -> FrozenTrial:
    if not trial.constraints or CONSTRAINTS in trial.system_attrs:
        return trial
    shown = copy.copy(trial)
    shown._system_attrs = {**trial.system_attrs, CONSTRAINTS: _in_order(trial.constraints)}
    return shown


def _in_order(constraints: Mapping[str, float]) -> list[float]:
    """One value a gate, in the gates' order: the dashboard knows no names."""
    known = [name for name in gates.GATES if name in constraints]
    return [constraints[name] for name in [*known, *sorted(constraints.keys() - set(known))]]


def _note(trial_id: int | None, body: str) -> dict[str, Any]:
    """A note as the dashboard keeps it."""
    prefix = "dashboard:" if trial_id is None else f"dashboard:{trial_id}:"
    return {f"{prefix}note_ver": 0, f"{prefix}note_str:0": body}
