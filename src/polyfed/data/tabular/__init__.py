"""Reads tables, infers what their columns are, and prepares their rows for networks."""
