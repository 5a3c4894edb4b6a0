"""How far a setting's next-token distributions are from the reference setting's: pure functions, no I/O.

Both settings read the same target tokens, and of each the log-probabilities of the TOP likeliest next tokens are known,
with that of the target token itself. Two figures come of it, over all target tokens:

- top-1 agreement: the share whose likeliest token is the reference's. Exact; of equally likely ones the one with the
  lowest id counts.
- Kullback-Leibler divergence from the reference, in nats a token: Σ p ln(p ÷ q) over the tokens that both sides show,
  with all others as one token. Merging tokens never raises it (the data-processing inequality: Cover and Thomas,
  Elements of Information Theory, section 2.8): what is found is a lower bound, so that no setting is refused for less
  than it has. It is 0 between a setting and itself.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from search.gates import Finding, of_mean, of_share

TOP = 20  # tokens whose log-probabilities are asked for: as many as vLLM gives unless max_logprobs says otherwise
LEAST_REST = 1e-6  # probability of all tokens that are not shown: below it is what float32 rounds by
SAME, AWAY = "of target tokens have the reference's likeliest token", "nats a token from the reference"

Distribution = Mapping[int, float]  # log-probability (nats) by token id, of the likeliest tokens


@dataclass(frozen=True)
class Agreement:
    """Over some tokens: how many have the reference's likeliest token, and nats from the reference, summed."""

    top1: int
    kl: float


def compare(reference: Sequence[Distribution], setting: Sequence[Distribution]) -> Agreement:
    """How a setting's distributions agree with the reference's, position by position.

    Raises:
        ValueError: they are of different lengths, or one shows no token.
    """
    pairs = list(zip(reference, setting, strict=True))
    same = sum(likeliest(p) == likeliest(q) for p, q in pairs)
    return Agreement(same, math.fsum(divergence(p, q) for p, q in pairs))


def judge(agrees: Agreement, used: int, of: int, limits: Mapping[str, float]) -> list[Finding]:
    """What the gates say that ask for agreement, after `used` of all `of` target tokens.

    Args:
        agrees: over the tokens used.
        used: how many they are.
        of: how many there are.
        limits: of top1, of kl, or of both; what else there is in it is left alone.
    """
    found = []
    if "top1" in limits:
        found.append(of_share("top1", SAME, agrees.top1, used, of, limits["top1"]))
    if "kl" in limits:
        found.append(of_mean("kl", AWAY, agrees.kl, used, of, limits["kl"]))
    return found


def likeliest(distribution: Distribution) -> int:
    """The likeliest token; of equally likely ones that with the lowest id.

    Raises:
        ValueError: no token is shown.
    """
    return min(distribution, key=lambda token: (-distribution[token], token))


def divergence(p: Distribution, q: Distribution) -> float:
    """Kullback-Leibler divergence of q from p in nats, at the least (see above); never below 0."""
    shown = p.keys() & q.keys()
    parts = [math.exp(p[token]) * (p[token] - q[token]) for token in shown]
    rest_p, rest_q = (max(LEAST_REST, 1 - math.fsum(math.exp(d[t]) for t in shown)) for d in (p, q))
    return max(0.0, math.fsum(parts) + rest_p * math.log(rest_p / rest_q))


def pack(distributions: Sequence[Distribution]) -> bytes:
    """A record's distributions as the store and an exported folder keep them: float32, compressed.

    zlib of, all little-endian: uint32 count of positions; for each a uint32 count of tokens; then all token ids as
    uint32; then all log-probabilities as float32.
    """
    counts = [len(d) for d in distributions]
    ids = [token for d in distributions for token in d]
    values = [value for d in distributions for value in d.values()]
    layout = f"<I{len(counts)}I{len(ids)}I{len(values)}f"
    return zlib.compress(struct.pack(layout, len(counts), *counts, *ids, *values))


def unpack(packed: bytes) -> list[dict[int, float]]:
    """The distributions that `pack` has packed.

    Raises:
        ValueError: these bytes are none.
    """
    try:
        content = zlib.decompress(packed)
        (positions,) = struct.unpack_from("<I", content)
        counts = struct.unpack_from(f"<{positions}I", content, 4)
        size, at = sum(counts), 4 + 4 * positions
        ids = iter(struct.unpack_from(f"<{size}I", content, at))
        values = iter(struct.unpack_from(f"<{size}f", content, at + 4 * size))
    except (zlib.error, struct.error) as error:
        raise ValueError(f"no packed distributions ({error})") from error
    return [{next(ids): next(values) for _ in range(count)} for count in counts]
