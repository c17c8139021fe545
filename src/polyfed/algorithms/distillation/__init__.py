"""Methods that exchange outputs or a shared network instead of personal weights."""
