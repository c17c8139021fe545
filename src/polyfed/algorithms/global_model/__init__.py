"""Methods whose result is one model for all clients."""
