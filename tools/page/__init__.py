"""Opens the page in a real browser, compares what it shows with the API, and takes screenshots."""
