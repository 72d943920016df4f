"""How an answer comes: runs at the orchestrator; texts as thoughts, words and calls of tools; events on the wire."""
