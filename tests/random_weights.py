"""A real vLLM on random weights, by module:Class: for what `studies/gemma-4-e4b-a10g/make_shape.py` writes."""

from kernels.random_checkpoint import register_loader
from search.engine.vllm import VllmEngine


class RandomWeights(VllmEngine):
    """Loads models whose weights are drawn at random."""

    def load(self, request):
        register_loader()
        return super().load(request)
