"""Samplers compared over landscapes, in simulated seconds: `python -m search.bench samplers`."""
