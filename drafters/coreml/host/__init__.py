"""Between tokens and a package: the tree, the cache and the masks that the graph knows nothing of."""
