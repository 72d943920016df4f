"""Trains a draft model for a chat model by distillation from the chat model's answers to generated prompts."""
