"""HTTP as people's tools speak it: OpenAI's and Anthropic's APIs over a process that is a client of the orchestrator.

`model/` is what the served model understands, `shapes/` what goes over the wire, `mapping/` one into the other,
`answers/` how texts grow into events, `endpoints/` one family of paths a file. Knows nothing of workers and rounds.
"""
