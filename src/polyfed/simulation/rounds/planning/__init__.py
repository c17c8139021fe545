"""Plans rounds: which clients train and which are evaluated, and from which state they start."""
