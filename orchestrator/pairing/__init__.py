"""Which two models a cluster runs: their files, their tokenizer, and whether they mean the same by a token."""
