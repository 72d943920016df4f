"""Runs HTTP servers, sends them requests, and measures their latencies, CPU time and memory."""
