"""A converted model on disk: what is in it, how it is opened, and what holds it to the model it was made from."""
