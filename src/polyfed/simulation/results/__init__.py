"""What a run gives: tables, models, unseen clients, transfers."""
