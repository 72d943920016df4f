"""Drafters behind one interface, and how their branches grow. Both workers use them: a drafter can run in either."""
