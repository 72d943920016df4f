"""Trains models: pairs like the tiny one, and, for an existing target, heads (`heads/`) and draft models (`draft/`).

Nothing that runs a cluster imports this package. `corpus`, `recipe`, `record`, `progress` and `storage` do not import
PyTorch.
"""
