"""Requests, rounds, clients and the command line. Never imports MLX."""
