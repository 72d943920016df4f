"""Benchmarks of Outrider, run from the repository's root: `python -m bench.identity`, `python -m bench.hit_rate`."""
