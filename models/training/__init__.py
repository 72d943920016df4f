"""How the embedded pair is made: text, tokenizer, target, teacher's logits, distilled draft, Hugging Face files.

Training only: nothing that runs a cluster imports this package, and only its torch modules (`llama`, `loop`,
`teacher`, `distill`, `pipeline`, `export`) need PyTorch.
"""
