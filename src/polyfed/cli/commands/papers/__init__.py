"""Implements the command `polyfed reproduce`, which computes the tables of papers again."""
