"""Frames that nobody sensible sends, and the sockets that they are sent to: see `bench.fuzz_frames`."""
