"""What every room builds on: the contract of a method, data, local training, evaluation, random numbers, errors."""
