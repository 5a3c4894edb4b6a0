"""Which card a figure was measured on: figures of different cards are compared only through the reference setting."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

SHARE = "VLLM_PARETO_CARD"  # environment key: a searcher's share of a processor that several searchers divide


def card_of(facts: Mapping[str, Any]) -> str:
    """The card's name: a GPU's uuid, otherwise the processor's model with the share of it that is searched on.

    Args:
        facts: what an engine says of where it runs (`Loaded.environment`).
    """
    if facts.get("gpu_uuid"):
        return str(facts["gpu_uuid"])
    name = str(facts.get("processor") or facts.get("engine") or "unknown")
    return " ".join(filter(None, (name[:150], os.environ.get(SHARE, "")[:40])))
