"""Reads tables, infers the types of their columns, and converts their rows to inputs of networks."""
