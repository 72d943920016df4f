"""Drafters that read the target's hidden states: small heads that predict its next tokens from them."""
