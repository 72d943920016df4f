"""The process with the small model: drafters behind one interface, and the work ahead that they do."""
