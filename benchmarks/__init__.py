"""Benchmarks of te_jax: `python -m benchmarks --help`."""
