"""Isolated times: what each step costs by itself, on real workers without rounds, and forecasts from them."""
