"""The half that faces clients: admission, the line of waiting requests, text."""
