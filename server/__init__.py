"""The HTTP server: OpenAI's and Anthropic's APIs. It runs in a process of its own, as a client of the orchestrator.

`model/` loads the tokenizer and templates, `mapping.py` converts requests, `answers/` turns generated text into
events, and `endpoints/` has one file for each API with its requests and responses; `schemas.py` has what these share.
The server knows nothing about workers and rounds.
"""
