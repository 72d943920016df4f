"""What `auto` and the rounds believe: measured costs and odds, what follows from them, and what is kept of both."""
