"""Simulated engines with one thing wrong, by module:Class. For tests alone."""

import os

import msgspec

from search.card import SHARE
from search.engine.protocol import Sampled
from search.engine.simulated import SimulatedEngine
from search.knobs import DRAFTS


class NoMemoryForDrafts(SimulatedEngine):
    """Runs out of memory whenever it drafts."""

    def decode(self, request):
        if self._setting[DRAFTS]:
            raise MemoryError("no room for the drafter")
        return super().decode(request)


class UselessDrafter(SimulatedEngine):
    """Drafts, and none is accepted."""

    def decode(self, request):
        found = super().decode(request)
        return msgspec.structs.replace(found, accepted_per_pos=[0] * len(found.accepted_per_pos))


class LoopsWithDrafts(SimulatedEngine):
    """Repeats itself whenever it drafts."""

    def decode(self, request):
        share = 0.1 if self._setting[DRAFTS] else 0.9
        return msgspec.structs.replace(super().decode(request), distinct_4grams=share)


class KnowsNothing(SimulatedEngine):
    """As if its head were padded with zeros: each token is less likely than a guess."""

    def score(self, request):
        found = super().score(request)
        return msgspec.structs.replace(found, nll=found.tokens * 14.0)


class TooFast(SimulatedEngine):
    """Says of itself that each step reads 8 GB from a memory that gives 1 TB a second, and makes 190 a second."""

    def load(self, request):
        return msgspec.structs.replace(super().load(request), step_bytes=8 * 10**9, bandwidth=1e12)


class EndsAtOnce(SimulatedEngine):
    """Has nothing to add to any text."""

    def sample(self, request):
        return Sampled(token_ids=[])


class SlowerShare(SimulatedEngine):
    """A second card that takes half as long again for everything."""

    def decode(self, request):
        found = super().decode(request)
        slower = 1.5 if os.environ.get(SHARE) == "share 1" else 1.0
        first = [slower * seconds for seconds in found.first_token_s]
        return msgspec.structs.replace(found, latency_s=slower * found.latency_s, first_token_s=first)


class TellsNoLongWaits(SimulatedEngine):
    """Tells of no gap between tokens while many are drafted."""

    def decode(self, request):
        found = super().decode(request)
        return msgspec.structs.replace(found, first_token_s=[], waits_s=[]) if self._setting[DRAFTS] > 4 else found
