"""Simulates two hosts by network namespaces, with a configurable delay and packet loss between them."""
