"""A draft model for a trained target, distilled from answers that the target gives: prompts, text, training, export."""
