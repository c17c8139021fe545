"""Changes messages on their way between server and clients: compression, sums in fixed point, low-rank adapters."""
