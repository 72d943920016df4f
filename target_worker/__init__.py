"""The process of the target: verifies chains, and decodes plainly or drafts in-process on request."""
