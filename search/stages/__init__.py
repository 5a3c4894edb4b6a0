"""The stages of a trial: apply the knobs, gate on records and on tasks, time prompts.

A stage decides when it has seen enough; what it returns are rows for the store, not yet written.
"""

from search.stages.base import Observer, apply
from search.stages.perplexity import OTHER_BUILD, PerplexityStage
from search.stages.plain import PlainStage
from search.stages.tasks import TaskStage
from search.stages.throughput import CARD_PASSES, SpeedResult, ThroughputStage, reference_passes

__all__ = [
    "CARD_PASSES",
    "OTHER_BUILD",
    "Observer",
    "PerplexityStage",
    "PlainStage",
    "SpeedResult",
    "TaskStage",
    "ThroughputStage",
    "apply",
    "reference_passes",
]
