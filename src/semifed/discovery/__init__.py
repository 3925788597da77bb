"""Finding categories that have no name yet: which images look seen, what is near what, and which belong together."""
