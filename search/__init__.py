"""A quality-gated Pareto search over how vLLM decodes a language model."""

__version__ = "0.1.0"
