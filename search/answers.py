"""When a task counts as answered as expected: pure functions over texts.

An answer is what the model writes greedily after the prompt until it ends the text, one of the stop texts comes (which
is no part of it), or `max_tokens` are written. Special tokens are left out. It matches if it is the expected text once
the white space of both is made one: each run of characters that Unicode calls white space (those that Python's
`str.split` splits at) becomes one space, and none stands at the ends. Nothing else is changed: case, punctuation and
what the model adds after the answer all count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from search.gates import Finding, of_share


@dataclass(frozen=True)
class Answer:
    """What was answered to one task, with its white space made one, and whether that was expected."""

    text: str
    matched: bool


def normalised(text: str) -> str:
    """A text with its white space made one."""
    return " ".join(text.split())


def marked(text: str, expected: str) -> Answer:
    """An answer as it came from the model, held against the expected one."""
    answer = normalised(text)
    return Answer(answer, answer == normalised(expected))


def judge(answers: Mapping[str, Answer], order: Sequence[str], least: float) -> Finding:
    """What the tasks answered so far say: those of `order` that have an answer.

    Args:
        answers: by task.
        order: all tasks, at least one of which has an answer.
        least: the share of all tasks that has to be answered as expected.
    """
    used = [answers[task] for task in order if task in answers]
    good = sum(answer.matched for answer in used)
    return of_share("exact", "of the tasks answered as expected", good, len(used), len(order), least)
