"""The prefill worker: reads prompts instead of the target, and sends their keys and values."""
