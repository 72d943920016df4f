"""All measuring: what is timed, compared and simulated. A client of the orchestrator like any other.

Programs: identity, hit_rate, after_tune, nothing_pays, pauses, sampling_rules, simulate, policies, heatmap, tree_step,
model_types, run as `python -m outrider.bench.identity` and so on. They start oracle and
rules as processes. The rest is parts of them.
"""
