"""Measurements and output of `outrider bench`, `tune` and `overlap`, which are ordinary clients of the orchestrator."""
