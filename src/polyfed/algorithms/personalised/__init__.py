"""Methods that give each client a model of its own, of one architecture."""
