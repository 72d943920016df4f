"""From generated text to responses: running requests, splitting text into parts, server-sent events, usage."""
