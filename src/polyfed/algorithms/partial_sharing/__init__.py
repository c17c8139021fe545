"""Methods that share some layers of a network and keep the others at the client."""
