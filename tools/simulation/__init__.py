"""Machines that one does not have: rounds in arithmetic."""
