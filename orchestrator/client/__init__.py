"""The Python API: clients, results, and a local cluster."""
