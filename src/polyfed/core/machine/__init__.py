"""Memory and threads of this machine."""
