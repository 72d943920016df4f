"""The HTTP server: OpenAI's and Anthropic's APIs. It runs in a process of its own, as a client of the orchestrator.

`model/` loads the served model's text side, `shapes/` has the requests and responses of each API, `mapping/` converts
requests, `answers/` turns generated text into events, and `endpoints/` has one file for each group of paths. The server
knows nothing about workers and rounds.
"""
