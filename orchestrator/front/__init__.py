"""The front thread: clients, admission, the queue of waiting requests, text."""
