"""Clusters in one thread and in virtual time: the real rounds and draft workers, a profile's machine."""
