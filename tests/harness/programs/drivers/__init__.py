"""Scripts that other Pythons and node run: each takes a URL and a model, and prints what came of its task as JSON."""
