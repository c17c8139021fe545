"""Draws the clients of a round: uniformly, by availability, by loss, by utility, or by a rule of the user's own."""
