"""Whether a setting says what the model says: pure functions over token ids.

Greedy decoding with drafts should give the tokens that plain greedy decoding gives. Where two candidates are all but
equally likely, rounding may tip them either way, because a step over several rows rounds otherwise than a step over
one; what follows then differs too. So only the first difference of a prompt tells anything: with a clear lead of the
plain token it is a bug, with a near tie it is not.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from search.broken import LEAST_SHARE

NEAR_TIE = 0.25  # nats: what two logits of 16 to 32 move by together if each is rounded to its next bfloat16


@dataclass(frozen=True)
class Plain:
    """Plain greedy tokens after one prompt, and by how much each leads the next candidate (nats)."""

    token_ids: Sequence[int]
    gaps: Sequence[float]


@dataclass(frozen=True)
class Divergence:
    """The first token of a prompt at which a setting leaves plain greedy decoding, and the lead it left."""

    prompt: str
    position: int
    gap: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding can explain it."""
        return self.gap <= NEAR_TIE


@dataclass(frozen=True)
class Identity:
    """How often a setting's tokens are the plain ones: over `prompts`, those that differ with where and why."""

    prompts: int
    divergences: tuple[Divergence, ...]

    @property
    def rate(self) -> float:
        """Share of prompts with the same tokens from first to last."""
        return 1 - len(self.divergences) / self.prompts

    @property
    def unexplained(self) -> list[Divergence]:
        """Differences that are no near ties."""
        return [d for d in self.divergences if not d.near_tie]

    def as_json(self) -> dict[str, Any]:
        """What evidence keeps of it."""
        first = min(self.divergences, key=lambda d: d.position, default=None)
        return {
            "rate": self.rate,
            "prompts": self.prompts,
            "near_ties": sum(d.near_tie for d in self.divergences),
            "unexplained": len(self.unexplained),
            "first_divergence": first and {"prompt": first.prompt, "position": first.position, "gap": first.gap},
        }


def compare_tokens(plain: Mapping[str, Plain], tokens: Mapping[str, Sequence[int]]) -> Identity:
    """Compare a setting's tokens with plain greedy ones, prompt by prompt.

    Raises:
        ValueError: no prompt is common to both.
    """
    common = sorted(plain.keys() & tokens.keys())
    if not common:
        raise ValueError("there is no prompt to compare tokens on")
    found = []
    for prompt in common:
        pairs = zip(plain[prompt].token_ids, tokens[prompt], strict=True)
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if position is not None:
            found.append(Divergence(prompt, position, plain[prompt].gaps[position]))
    return Identity(len(common), tuple(found))


@dataclass(frozen=True)
class Variety:
    """How varied outputs are, averaged over prompts: share of distinct 4-grams, and compressed ÷ plain size."""

    distinct_4grams: float
    compression: float


def distinct_4grams(tokens: Sequence[int]) -> float:
    """Share of distinct 4-grams in one output; 1 for an output too short to have two."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def variety(outputs: Mapping[str, Sequence[int]]) -> Variety:
    """How varied the outputs are; text that loops has little of either.

    Raises:
        ValueError: there is no output of four tokens or more.
    """
    texts = [list(tokens) for tokens in outputs.values() if len(tokens) >= 4]
    if not texts:
        raise ValueError("there is no output of four tokens or more")
    sizes = [b"".join(token.to_bytes(4, "big") for token in text) for text in texts]
    return Variety(
        distinct_4grams=fmean(map(distinct_4grams, texts)),
        compression=fmean(len(zlib.compress(size, 9)) / len(size) for size in sizes),
    )


def degenerate(found: Variety, reference: Variety) -> bool:
    """Whether outputs loop where the reference setting's do not."""
    return (
        found.distinct_4grams < LEAST_SHARE * reference.distinct_4grams
        or found.compression < LEAST_SHARE * reference.compression
    )
