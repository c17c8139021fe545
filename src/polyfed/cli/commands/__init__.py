"""Implements the subcommands of `polyfed`: each parses its options, builds the experiment, and prints the results."""
