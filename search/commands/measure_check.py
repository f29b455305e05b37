"""`search measure --check SYSTEM`: training steps of small transformers, run here, against what a system predicts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture.device import Device, open_device
from capture.step import Task, Timed, run_steps
from estimator.model import ModelSpec
from estimator.result import StepResult
from estimator.step import evaluate
from estimator.strategy import Fusion, Overlap, Strategy
from estimator.workload import Workload
from hardware.catalog import system_from_mapping
from hardware.dtype import DType
from hardware.system import SystemSpec
from hardware.units import MIB
from results.report.text import columns
from search.commands.answer import answer, tell
from search.yaml_lines import read_document

__all__ = ["check", "compare", "tasks"]

RECIPES = {DType.FP32: "fp32", DType.BF16: "bf16_grads"}  # as capture/step.py trains
BUCKET_BYTES = 25 * MIB  # of DistributedDataParallel, by default
STEP_S = 1.0  # of a step at the best product's rate, at most: several models with repeats take a minute or two


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One task: seconds as they were measured and as they are predicted."""

    task: Task
    measured: Timed
    predicted: StepResult

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return float(self.predicted.step_time_s) / self.measured.step.seconds - 1.0


def check(args: argparse.Namespace) -> int:
    """Runs the tasks of a system, and tells how far its predictions are off."""
    if args.out is not None or args.dtypes:
        raise ValueError("--check runs what its system says: leave --out and --dtype away")
    system = _system(Path(args.check))
    device = open_device(args.device, args.ranks or system.num_chips)
    if device.ranks != system.num_chips:
        law = f"--ranks must be the chips of the system ({system.num_chips})"
        raise ValueError(f"{law}, but got {device.ranks}; leave it away, or measure with --ranks {device.ranks}")
    chosen = tasks(system)
    tell(f"{device.told()}: {len(chosen)} models, each trained for a few steps")
    found = [compare(task, system, device) for task in chosen]
    answer(args, text=_text(system, found), data=_plain(system, found))
    return 0


def _system(path: Path) -> SystemSpec:
    if not path.is_file():
        raise ValueError(f"{path}: --check needs a system file, but there is none; search calibrate -o writes one")
    return system_from_mapping(read_document(path).mapping(()))


def tasks(system: SystemSpec) -> list[Task]:
    """Three small models of different balance, larger on faster chips."""
    dtype = next((d for d in (DType.BF16, DType.FP32) if f"gemm_efficiency.{d.value}" in system.chip.measured), None)
    if system.chip.offers(DType.FP32) and f"gemm_efficiency.{DType.FP32.value}" in system.chip.measured:
        dtype = DType.FP32  # the first that search measure takes on a CPU
    if dtype is None:
        have = ", ".join(system.chip.measured) or "nothing"
        raise ValueError(
            f"{system.name}: a checked system has measured fp32 or bf16 products, but it has {have}; calibrate it first"
        )
    scale = 1
    while _flops(_task("base", dtype, 2 * scale)) / system.chip.peak(dtype) < STEP_S and scale < MOST_SCALE:
        scale *= 2
    return [_task(shape, dtype, scale) for shape in SHAPES]


MOST_SCALE = 8
SHAPES = {  # layers, hidden, ffn, sequence, sequences at a time, at scale 1: 1,024 tokens
    "base": (4, 512, 1536, 512, 2),
    "long": (4, 512, 1536, 1024, 1),
    "wide": (2, 1024, 3072, 256, 4),
}
HEAD_DIM, VOCAB = 64, 4096


def _task(shape: str, dtype: DType, scale: int) -> Task:
    layers, hidden, ffn, seq, batch = SHAPES[shape]
    hidden, ffn = hidden * scale, ffn * scale
    model = ModelSpec(
        name=f"{shape}-{hidden}", num_layers=layers, hidden=hidden, ffn=ffn, num_heads=hidden // HEAD_DIM,
        num_kv_heads=hidden // HEAD_DIM, head_dim=HEAD_DIM, vocab=VOCAB,
    )  # fmt: skip
    return Task(name=shape, model=model, seq=seq, batch=batch, dtype=dtype.value)


def _flops(task: Task) -> float:
    """Of a step: six a parameter and token (Kaplan 2020, arXiv:2001.08361, section 2.1)."""
    return 6.0 * task.model.num_parameters() * task.seq * task.batch


def compare(task: Task, system: SystemSpec, device: Device) -> Compared:
    """One task, predicted and run."""
    strategy = Strategy(
        precision=RECIPES[DType(task.dtype)], micro_batch=task.batch, fusion=frozenset({Fusion.FLASH_ATTENTION}),
        overlap=Overlap(dp=1), bucket_bytes=BUCKET_BYTES,
    )  # fmt: skip
    workload = Workload(seq=task.seq, global_batch=task.batch * device.ranks)
    predicted = evaluate(task.model, strategy, system, workload)
    return Compared(task=task, measured=run_steps(task, device), predicted=predicted)


def _text(system: SystemSpec, found: list[Compared]) -> str:
    rows: list[list[str]] = []
    parts: list[list[str]] = []
    for one in found:
        batch, step = f"{one.task.batch} x {one.task.seq}", one.measured.step
        busy = "" if step.trusted else "busy"
        rows.append([
            one.task.model.name, batch, f"{step.seconds:.3f}", f"{float(one.predicted.step_time_s):.3f}",
            f"{one.error:+.1%}", f"{step.spread:.1%}", busy,
        ])  # fmt: skip
        expected = _predicted(one.predicted)
        parts.append([one.task.model.name, *(f"{one.measured.parts[n]:.3f} / {s:.3f}" for n, s in expected.items())])
    lines = columns(["model", "batch", "measured s", "predicted s", "error", "spread", ""], rows)
    more = columns(["measured / predicted s", "forward", "backward", "optimizer"], parts)
    mean = sum(abs(one.error) for one in found) / len(found)
    ranks = f"{system.num_chips} rank{'s' if system.num_chips > 1 else ''}"
    told = [f"{system.name}: mean absolute error of a step {mean:.1%} ({found[0].task.dtype}, {ranks})"]
    if not all(one.measured.step.trusted for one in found):
        told.append("busy: other processes computed meanwhile, or repeats differed; measure again when it is quiet")
    return "\n".join([*lines, "", *more, "", *told, ""])


def _predicted(result: StepResult) -> dict[str, float]:
    """The parts that a run tells apart; gradients travel inside backward."""
    return {
        "forward": float(result.forward_s),
        "backward": float(result.backward_s) + float(result.exposed_comm_dp_s),
        "optimizer": float(result.optimizer_s) + float(result.fixed_host_s),
    }


def _plain(system: SystemSpec, found: list[Compared]) -> dict[str, Any]:
    return {
        "system": system.name, "ranks": system.num_chips,
        "mean_absolute_error": sum(abs(one.error) for one in found) / len(found),
        "cases": [
            {
                "model": one.task.model.name, "seq": one.task.seq, "batch": one.task.batch, "dtype": one.task.dtype,
                "measured_step_time_s": one.measured.step.seconds, "measured_s": one.measured.parts,
                "predicted_step_time_s": float(one.predicted.step_time_s), "predicted_s": _predicted(one.predicted),
                "error": one.error, "spread": one.measured.step.spread, "others_share": one.measured.step.others,
                "trusted": one.measured.step.trusted,
            }
            for one in found
        ],
    }  # fmt: skip
