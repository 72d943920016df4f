"""Simulates fleets in virtual time, for planning, and compares the simulation with real processes."""
