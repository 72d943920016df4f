"""Trains heads that read a target's hidden states, and writes them in published layouts.

All modules but `recipe` import PyTorch.
"""
