"""Random and mutated frames, and the fuzzed sockets, for `tests.harness.fuzz_frames`."""
