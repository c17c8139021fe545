"""Runs federated learning between real sites, each of which keeps its data and private state on its own machine.

`server` and `site` have the two sides, `protocol` the messages between them, `privacy` clipping, noise and their budget,
`secure_aggregation` the secure sums, `trial` a deployment on one machine, and `doctor` the checks of its folders. Only
`flower` knows how messages are carried. Units and containers start the modules `link`, `supernode` and `worker`.
"""
