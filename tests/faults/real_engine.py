"""The real vLLM with the same faults; apart from the simulated one, because it takes seconds to import."""

from search.engine.vllm import VllmEngine
from tests.faults.engine import Faulty


class FaultyVllm(Faulty, VllmEngine):
    """A vLLM that is killed, stopped or silent when the plan says so."""
