"""One family of paths a file: from a request's shape to the answer's."""
