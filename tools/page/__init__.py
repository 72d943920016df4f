"""The live page in a real browser: compares what it shows with what the API answers, and takes its picture."""
