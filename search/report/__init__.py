"""A study as one HTML file: `figures` draws, `page` writes, `__main__` is the command."""
