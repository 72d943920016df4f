"""The messages between processes, and what all processes share. Imports neither MLX nor Outrider's other packages."""
