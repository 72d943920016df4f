"""Several engines behind one HTTP address (docs/fleet.md). The only package that uses Ray, of the extra `fleet`."""
