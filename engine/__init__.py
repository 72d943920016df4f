"""Computes with MLX: loading, caches with rollback and branches, sampling and its noise. Opens no socket."""
