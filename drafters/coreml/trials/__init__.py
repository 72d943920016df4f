"""Which package on which compute unit works here and what it costs, tried out in processes that may die."""
