"""Drafters that read the target: small heads that make of its hidden rows what it will say next."""
