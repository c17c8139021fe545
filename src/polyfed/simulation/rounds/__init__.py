"""One round: sampling, messages, replies, aggregation, resumption."""
