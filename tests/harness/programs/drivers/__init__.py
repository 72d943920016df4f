"""Scripts for other Python environments and for node. Each takes a URL and a model, runs a task and prints the results
as JSON."""
