"""What each thing costs by itself, over the real workers without the rounds, and what the formula makes of that."""
