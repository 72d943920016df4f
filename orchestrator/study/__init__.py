"""Measuring what a machine can do with a pair: overlap, probe, prediction, comparison, pictures."""
