"""Holds the engines, which run the clients of a simulation in this process, in a pool of processes or on a Ray
cluster."""
