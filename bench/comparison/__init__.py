"""Ways to generate, run in turns on the same prompts: who competes, who won, and why."""
