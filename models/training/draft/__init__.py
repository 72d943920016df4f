"""Trains a draft model for a target by distillation from the target's answers: prompts, text, training, export."""
