"""Every cluster of the catalogue prices a step of a small and of a large model, at a plausible share of its peak."""

import numpy as np
import pytest

import spaces
from estimator.model_io import load_model
from estimator.step import evaluate
from estimator.strategy import Overlap, Recompute, RecomputeKind, Strategy
from estimator.workload import Workload
from hardware import catalog
from hardware.dtype import DType

TP, PP = (x.ravel().astype(float) for x in np.meshgrid([1, 2, 4, 8], [1, 2, 4, 8]))
# Below 0.15 a training step is broken, above 0.75 no published step of a dense model on any chip has come.
SANE = (0.15, 0.75)


def best(model, name, num_chips, batch):
    """The best MFU that fits among 4 x 4 meshes, with and without recompute, ZeRO 1 and 3."""
    system = catalog.cluster(name, num_chips)
    precision = "bf16" if system.chip.offers(DType.BF16) else "fp16"
    found = []
    for recompute in (Recompute(), Recompute(kind=RecomputeKind.FULL)):
        for zero in (1, 3):
            s = Strategy(
                tp=TP, pp=PP, sequence_parallel=True, zero_stage=zero, recompute=recompute, precision=precision,
                overlap=Overlap(tp=1, dp=1),
            )  # fmt: skip
            result = evaluate(model, s, system, Workload(seq=4096, global_batch=batch))
            found.append(np.where(result.feasible, result.mfu, 0.0))
    return float(np.max(found))


@pytest.mark.parametrize("name", catalog.cluster_names())
def test_an_8b_model_trains_at_a_plausible_share_of_peak(name):
    chips = min(64, catalog.cluster(name).num_chips)
    low, high = SANE
    assert low < best(load_model("llama3_8b", [spaces.MODELS]), name, chips, 2 * chips) < high


@pytest.mark.parametrize("name", catalog.cluster_names())
def test_a_70b_model_trains_at_a_plausible_share_of_peak(name):
    chips = 256 if name != "a100_pcie" else 32
    low, high = SANE
    assert low < best(load_model("llama3_70b", [spaces.MODELS]), name, chips, 2 * chips) < high
