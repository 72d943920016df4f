"""Benchmarks of Outrider, run from the repository's root: `python -m bench.identity` and so on.

Programs: identity, hit_rate, nothing_pays, sampling_rules, simulate, policies, heatmap, tree_step, coreml_figures. They
start oracle and rules as processes. The rest are parts of them.
"""
