"""One round: sampling, dispatch, replies, aggregation; the start and the resumption of a run."""
