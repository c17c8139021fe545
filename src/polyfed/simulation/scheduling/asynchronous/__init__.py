"""Runs rounds that wait for no straggler: FedBuff and FedAsync, in simulated time."""
