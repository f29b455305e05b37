"""A model that answers: seconds of prefill and of each decoded token, bytes of weights and cache.

The same ops, passes and prices as a training step, without its backward; queries and keys have lengths of their own.
`step.infer` is the sentence that this package says; it stands apart, for names and columns load without any price.
"""

from __future__ import annotations

from estimator.inference.deployment import Deployment
from estimator.inference.formats import Formats
from estimator.inference.result import SERVED_COLUMNS, InferenceResult
from estimator.inference.workload import Requests, ServingPhase

__all__ = ["SERVED_COLUMNS", "Deployment", "Formats", "InferenceResult", "Requests", "ServingPhase"]
