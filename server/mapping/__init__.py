"""Converts requests of every API to the model's terms: messages, tools, output format, sampling parameters."""
