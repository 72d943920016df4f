"""The models of a cluster: their files, their tokenizers, and whether their vocabularies are equal."""
