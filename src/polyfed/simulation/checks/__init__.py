"""What is checked before the first round."""
