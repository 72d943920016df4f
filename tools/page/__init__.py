"""The live page in a real browser: what it shows held against what the API says, and its picture."""
