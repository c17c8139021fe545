"""Changes messages between server and clients: compresses them, adds them in fixed point, and converts low-rank
adapters.
"""
