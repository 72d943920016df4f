"""What goes over the wire, as each API writes it; checked by pydantic, described by it in /openapi.json."""
