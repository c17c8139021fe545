"""What travels: compression, fixed-point numbers, low-rank adapters."""
