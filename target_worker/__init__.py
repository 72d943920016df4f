"""The process with the large model: verifies chains, and decodes or drafts by itself when asked."""
