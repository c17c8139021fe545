"""Implements the subcommands of `polyfed`: parses their options, builds the experiment, and prints the results."""
