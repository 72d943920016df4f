"""Several requests at once, as their clients see them: when each token came, in which company, by which way."""
