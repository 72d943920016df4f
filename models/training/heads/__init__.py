"""Trains heads that read a target's hidden states: text, rows, the learner of each kind of head, published layouts.

All modules but `recipe` and `record` need PyTorch.
"""
