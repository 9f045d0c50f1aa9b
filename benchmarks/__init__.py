"""Benchmarks of te_jax: `python benchmarks/run.py --help`."""
