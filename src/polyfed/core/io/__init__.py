"""Files that are written whole or not at all, code that users trust, checks of what is read."""
