"""What a round has verified: who says what comes next, which of it is taken, and what is done after a miss."""
