"""What a trace of `--trace` tells: work on one clock, where the time went, the rounds gone through again."""
