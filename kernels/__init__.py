"""What the search adds to vLLM's own kernels, installed through vLLM's plugin mechanism."""
