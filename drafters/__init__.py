"""Drafters behind one interface, and the growth of their branches. A drafter can run in either worker."""
