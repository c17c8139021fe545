"""Checks the clients and their data: leaks, tables, tokens, private states."""
