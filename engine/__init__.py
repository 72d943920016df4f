"""What computes with MLX: loading, caches with rollback and branches, sampling and its noise. Knows no socket."""
