"""Simulates machines that you do not have: workers whose forwards take a profile's times, and simulated rounds."""
