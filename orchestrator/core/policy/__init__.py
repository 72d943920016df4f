"""Estimates, forecasts, the policy of `auto`, and the files that keep what they learned."""
