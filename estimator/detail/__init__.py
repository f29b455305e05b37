"""From a configuration to every operation of every micro-batch on every pipeline rank, ready to be replayed.

The same graph, passes, prices and schedules as the estimate, without its shortcuts: nothing is summed before it runs.
"""
