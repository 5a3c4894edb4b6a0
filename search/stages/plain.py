"""What the model says without drafts: greedy tokens and their leads, and scores of held-out records."""

from __future__ import annotations

from collections.abc import Sequence

from search.data import Prompt, Record
from search.engine.protocol import Decode, Decoded, Setting
from search.gate import RecordScore
from search.identity import Plain
from search.stages.base import Stage, apply, score
from search.store import REFERENCE


class PlainStage(Stage):
    """Measures the same model and window at K = 0, against which a finalist's served output is held."""

    def tokens(self, setting: Setting, prompts: Sequence[Prompt], output_tokens: int) -> dict[str, Plain]:
        """Greedy tokens of `setting`, which must have no drafts, by prompt id."""
        found = {}
        self._session.use(setting)
        with self._session.within("confirm"):
            apply(self._session, setting, prompts[0])
            for number, prompt in enumerate(prompts):
                self._observer.stage(REFERENCE, setting, "plain", number, len(prompts))
                request = Decode(
                    prompt_id=prompt.id, prompt=list(prompt.token_ids), max_tokens=output_tokens, show_tokens=True
                )
                decoded = self._session.ask(request, Decoded)
                found[prompt.id] = Plain(decoded.token_ids, decoded.gaps)
        return found

    def scores(self, setting: Setting, records: Sequence[Record]) -> dict[str, RecordScore]:
        """Scores of `records` at `setting`, by record id."""
        found = {}
        self._session.use(setting)
        with self._session.within("confirm"):
            apply(self._session, setting)
            for number, record in enumerate(records):
                self._observer.stage(REFERENCE, setting, "held-out", number, len(records))
                found[record.id] = score(self._session, record)
        return found
