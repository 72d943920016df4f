"""Fleets in virtual time."""
