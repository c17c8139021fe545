"""The loop of rounds: sample clients, run them on an engine, aggregate, evaluate, checkpoint."""
