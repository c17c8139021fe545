"""What the command line does: options to configurations, configurations to experiments, tables of results."""
