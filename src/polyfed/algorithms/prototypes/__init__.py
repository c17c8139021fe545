"""Methods that exchange class prototypes or a common head."""
