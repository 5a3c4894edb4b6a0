"""Real vLLM engines that differ in one thing from the search's own, by module:Class."""

from kernels.random_checkpoint import register_loader
from search.engine import vllm


class RandomWeights(vllm.VllmEngine):
    """Loads models whose weights are drawn at random: what `studies/gemma-4-e4b-a10g/make_shape.py` writes."""

    def load(self, request):
        register_loader()
        return super().load(request)


class TopLogprobs(RandomWeights):
    """In a shown completion's `gaps` stand the 20 largest log-probabilities of each token, largest first."""

    def _generate(self, prompts, params):
        if params.logprobs:
            params.logprobs = 20
        outputs = super()._generate(prompts, params)
        self._shown = outputs[0].outputs[0].logprobs or []
        return outputs

    def decode(self, request):
        found = super().decode(request)
        found.gaps[:] = [x for entry in self._shown for x in _largest(entry)]
        return found


class Caching(vllm.VllmEngine):
    """Keeps prompts in the prefix cache, as vLLM does unless it is told not to."""

    def load(self, request):
        vllm.FIXED_ARGS["enable_prefix_caching"] = True
        return super().load(request)


def _largest(entry):
    return sorted((candidate.logprob for candidate in entry.values()), reverse=True)[:20]
