"""Drafters behind one interface, and how their branches grow. Below both workers: a drafter can live in either."""
