"""Machines that one does not have: their workers, which run with a profile's times, and rounds in arithmetic."""
