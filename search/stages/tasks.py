"""The task stage: how many of a study's tasks a setting answers as expected, remembered by its quality knobs.

Tasks are decoded without drafts (K = 0), whatever the setting drafts: a drafted text is the same but where two tokens
are all but equally likely, and there rounding decides otherwise in a step of several rows than in one of a single row.
With K = 0 an answer hangs on the quality knobs alone, and not on which trial came first, so that it can be remembered.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence

from search.answers import Answer, judge, marked
from search.engine.protocol import Setting, Solve, Solved
from search.engine.session import EngineSession
from search.gates import Finding, TaskSpec
from search.knobs import DRAFTS, canonical, quality_part
from search.spec import StudySpec
from search.stages.base import Observer, Stage, apply
from search.stages.perplexity import REMEMBER_S
from search.store import REFERENCE, Measurement, Store


class TaskStage(Stage):
    """Asks the tasks `asked` of a study. `recall` must have run before a trial is measured."""

    def __init__(
        self, spec: StudySpec, asked: TaskSpec, session: EngineSession, store: Store, observer: Observer
    ) -> None:
        super().__init__(session, store, observer)
        self._asked = asked
        self._of_speed = spec.of_speed
        self._tasks = {task.id: task for task in spec.tasks()}
        self._file_hash = spec.definition()["gate.tasks.file"]
        self._least = float("nan")

    def recall(self) -> None:
        """Take up how many the reference setting answered; it must have been measured."""
        (reference,) = self._store.measurements("tasks", "done", REFERENCE)
        self._least = self._asked.least(float(reference.figures["exact"]))

    def measure_reference(self, setting: Setting, effective: Setting) -> tuple[Finding, Measurement]:
        """What the reference setting answers, held against what it asks of itself; the engine must run it."""
        started = time.perf_counter()
        key = self._key(setting)
        answers = self._store.remembered_answers(key)
        answers = self._ask(REFERENCE, setting, key, answers, least=None)
        share = judge(answers, list(self._tasks), 0.0).figure
        finding = judge(answers, list(self._tasks), self._asked.least(share))
        return finding, self._stage_row(REFERENCE, "done", setting, effective, finding, answers, started)

    def measure(self, trial: int, setting: Setting, effective: Setting) -> tuple[Finding, Measurement, bool]:
        """Ask tasks until it is known what the gate says; those answered before under the quality knobs are not asked.

        Returns:
            What was found, the stage's row, and whether the engine has been put to K = 0 for it.

        Raises:
            WorkerError: a task could not be answered.
        """
        started = time.perf_counter()
        key = self._key(setting)
        answers = self._store.remembered_answers(key)
        missing = not answers or judge(answers, list(self._tasks), self._least).outcome == "undecided"
        moved = missing and bool(setting.get(DRAFTS))
        if moved:
            apply(self._session, canonical({**setting, DRAFTS: 0}, self._session.loaded().native))
        if missing:
            answers = self._ask(trial, setting, key, answers, self._least)
        finding = judge(answers, list(self._tasks), self._least)
        status = "done" if missing else "remembered"
        return finding, self._stage_row(trial, status, setting, effective, finding, answers, started), moved

    def _ask(
        self, trial: int, setting: Setting, key: str, known: Mapping[str, Answer], least: float | None
    ) -> dict[str, Answer]:
        """Ask tasks one by one, after those `known`; returns both. With `least` it ends as soon as the gate refuses.

        Answers are remembered every REMEMBER_S and at the end, also at an untimely one.
        """
        answers, new = dict(known), dict[str, Answer]()
        remembered_at = time.monotonic()
        order = list(self._tasks)
        try:
            for number, task in enumerate(self._tasks.values()):
                if task.id in known:
                    continue
                self._observer.stage(trial, setting, "tasks", number, len(order))
                answers[task.id] = new[task.id] = marked(self._solve(task.id, task.prompt), task.expected)
                if time.monotonic() - remembered_at > REMEMBER_S:
                    self._store.remember_answers(key, new)
                    new, remembered_at = {}, time.monotonic()
                if least is not None and judge(answers, order, least).outcome == "over":
                    break
        finally:
            if new:
                self._store.remember_answers(key, new)
        return answers

    def _solve(self, task: str, prompt: str | Sequence[int]) -> str:
        given = prompt if isinstance(prompt, str) else list(prompt)
        request = Solve(task=task, prompt=given, max_tokens=self._asked.max_tokens, stop=list(self._asked.stop))
        return self._session.ask(request, Solved).text

    def _stage_row(
        self,
        trial: int,
        status: str,
        setting: Setting,
        effective: Setting,
        finding: Finding,
        answers: Mapping[str, Answer],
        started: float,
    ) -> Measurement:
        figures = {"verdict": finding.outcome, "exact": finding.figure, "least": finding.limit, "tasks": len(answers)}
        return self._row(trial, "tasks", status, setting, effective, figures, time.perf_counter() - started)

    def _key(self, setting: Setting) -> str:
        """What a remembered answer hangs on: model, build, tasks, how long they may be, and quality knobs."""
        loaded, knobs = self._session.loaded(), sorted(quality_part(setting, self._of_speed).items())
        text = repr((loaded.model_hash, loaded.build_hash, self._file_hash, self._asked.max_tokens, knobs))
        return hashlib.sha256(f"tasks {text} {self._asked.stop}".encode()).hexdigest()[:16]
