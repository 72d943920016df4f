"""What the served model understands: its names, its template, how it marks thoughts and calls of tools."""
