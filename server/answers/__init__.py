"""From generated text to responses: splitting text into parts, server-sent events, usage."""
