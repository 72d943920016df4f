"""Requests and responses of each API, as pydantic models."""
