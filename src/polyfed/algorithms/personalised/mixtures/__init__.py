"""Methods whose clients mix several models, or their outputs, in proportions that suit each client."""
