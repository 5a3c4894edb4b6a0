"""Landscapes to search without an engine: two fitted to measurements, one shifted, the others made to be difficult."""

from search.landscapes.a10g import A10G, OTHER_CARD
from search.landscapes.base import Costs, Decoding, Landscape, Noise
from search.landscapes.hostile import NO_EFFECT, NOISY, PLATEAU, TWO_ISLANDS, UNREACHABLE
from search.landscapes.miniature import MINIATURE

LANDSCAPES = {
    landscape.name: landscape
    for landscape in (A10G, MINIATURE, OTHER_CARD, TWO_ISLANDS, PLATEAU, NO_EFFECT, NOISY, UNREACHABLE)
}

__all__ = ["A10G", "LANDSCAPES", "MINIATURE", "OTHER_CARD", "Costs", "Decoding", "Landscape", "Noise"]
