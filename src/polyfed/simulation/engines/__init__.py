"""Where clients run: this process, a pool of processes, or a Ray cluster. `start` chooses."""
