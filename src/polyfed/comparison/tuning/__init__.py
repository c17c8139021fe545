"""The search of hyper-parameters, and how many rounds a client needs alone."""
