"""Networks: one cached module an architecture, buffers, tied weights, optimizers, precision."""
