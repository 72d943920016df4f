"""Simulated clusters in one thread and virtual time: the real scheduler and draft workers on a profile's machine."""
