"""Plans a comparison before it runs: methods, clients, budgets, and what it can decide."""
