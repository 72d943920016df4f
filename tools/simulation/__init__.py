"""Machines that you do not have: their workers, which run with a profile's times, and rounds in arithmetic."""
