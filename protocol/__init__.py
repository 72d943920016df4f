"""What processes say to each other. Imports neither MLX nor any other room."""
