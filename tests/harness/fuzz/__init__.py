"""Frames that nobody sensible sends, and the sockets that they are sent to: see `tests.harness.fuzz_frames`."""
