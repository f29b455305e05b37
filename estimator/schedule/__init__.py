"""In which order each rank runs its passes, and what that takes: the truth that the fast forms of span.py shorten.

Letters: p ranks (pipeline stages), v chunks a rank, m micro-batches, C model chunks in model order. Adding a schedule
means adding one row to `rules.py`: its order, its placement and its conditions. Knows nothing of bytes or of hardware;
gradient reduction and the optimizer come after it.

Times of one micro-batch on chunk j: `f[j]` forward, `b[j]` input gradient (with any recompute), `w[j]` weight gradient.
A schedule that does not split the backward runs b + w as one pass. An overlapped pair of DualPipe is one pass of
f + b + w that needs both inputs at its start and gives both outputs at its end: overlap hides communication, it does
not shorten compute.
"""

from estimator.schedule.one_way import side_by_side
from estimator.schedule.passes import Kind, Order, Pass
from estimator.schedule.rules import check_conditions, order, placement
from estimator.schedule.searched import zero_bubble
from estimator.schedule.simulation import Simulation, in_flight, owed, simulate

__all__ = ["Kind", "Order", "Pass", "Simulation", "check_conditions", "in_flight", "order", "owed", "placement",
           "side_by_side", "simulate", "zero_bubble"]  # fmt: skip
