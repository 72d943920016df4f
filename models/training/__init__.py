"""Trains the tiny pair: text, tokenizer, target, teacher's logits, distilled draft, Hugging Face files.

Nothing that runs a cluster imports this package. Only `llama`, `loop`, `teacher`, `distill`, `pipeline` and `export`
need PyTorch.
"""
