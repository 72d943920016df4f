"""From an mlx-lm checkpoint to a package: the graph, the weights in it, all or nothing."""
