"""The command `reproduce`: the tables of the papers."""
