"""For all tests and doctests: one torch thread a process; two processes with two each slow one another down."""

import torch

torch.set_num_threads(1)
