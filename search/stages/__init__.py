"""The stages of a trial: apply the knobs, gate on perplexity, time prompts.

A stage decides when it has seen enough; what it returns are rows for the store, not yet written.
"""

from search.stages.base import Observer, apply
from search.stages.perplexity import PerplexityStage
from search.stages.plain import PlainStage
from search.stages.throughput import ThroughputStage

__all__ = ["Observer", "PerplexityStage", "PlainStage", "ThroughputStage", "apply"]
