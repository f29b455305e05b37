"""The tables of the README's section "What the search found", made anew: `python -m tests.found` rewrites them.

Two minutes of one core. Seconds of a search are the machine's and stay with whoever measures them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from estimator.result import StepResult
from estimator.step import evaluate
from estimator.strategy import Schedule, Strategy
from hardware.units import GIB
from search.launch import final_front
from search.space import Space, load_space
from search.structures import strategy_at
from search.sweep import prepare, sweep_plan

__all__ = ["REFERENCES", "SPACES", "Found", "counted", "difference", "predicted", "priced", "rewritten", "row", "sweep"]

SPACES = ("deepseek_v3", "llama3_405b", "gpt3_175b", "qwen3_235b", "kimi_k2", "gpt_oss_120b", "nemotron_h_56b",
          "llama3_70b", "llama3_8b_small")  # fmt: skip
REFERENCES = {
    ("deepseek_v3", "published"): "DeepSeek-V3: pp 16, ep 64, DualPipe (arXiv:2412.19437)",
    ("llama3_405b", "published"): "Llama 3 405B: tp 8, pp 16, vpp 8, ZeRO-2 (arXiv:2407.21783)",
    ("gpt3_175b", "narayanan_2021"): "GPT-3: tp 8, pp 12, full recompute (arXiv:2104.04473)",
    ("gpt3_175b", "korthikanti_2022"): "GPT-3: tp 8, pp 8, vpp 3, selective (arXiv:2205.05198)",
    ("qwen3_235b", "recipe"): "Qwen3: recipe, tp 4, cp 2, pp 16, ep 8 (Megatron-Bridge)",
    ("qwen3_235b", "preset"): "Qwen3: preset, tp 2, pp 8, vpp 4, ep 32 (Megatron-Bridge)",
    ("kimi_k2", "published"): "Kimi-K2: pp 16, vpp 2, ep 16, activations on the host (arXiv:2507.20534)",
    ("gpt_oss_120b", "preset"): "GPT-OSS 120B: preset, pp 4, ep 8 (Megatron-Bridge)",
    ("gpt_oss_120b", "recipe"): "GPT-OSS 120B: recipe, tp 2, pp 4, ep 16 (Megatron-Bridge)",
    ("nemotron_h_56b", "recipe"): "Nemotron-H 56B: recipe, tp 8 (Megatron-Bridge)",
    ("llama3_70b", "rule_of_thumb"): "Llama 3 70B: tp 8, pp 4, vpp 5 (a rule of thumb)",
    ("llama3_8b_small", "fully_sharded"): "Llama 3 8B: ZeRO-3, full recompute",
}
PARTS = {
    "compute": ("forward_s", "backward_s"), "recompute": ("recompute_s",), "bubble": ("bubble_s",),
    "tp": ("exposed_comm_tp_s",), "cp": ("exposed_comm_cp_s",), "all-to-all": ("exposed_comm_ep_s",),
    "pp": ("exposed_comm_pp_s",), "dp": ("exposed_comm_dp_s",), "offload": ("exposed_offload_s",),
}  # fmt: skip
LEAST_TOLD = 0.04  # seconds; smaller differences are left out


@dataclass(frozen=True, slots=True)
class Found:
    """What a sweep of a space found: its count of legal candidates, and objectives by id of the front."""

    space: Space
    legal: int
    front: dict[int, tuple[float, ...]]

    def best(self, memory_bytes: float) -> Strategy:
        """The fastest point of the front that needs no more memory, in a space of these two objectives."""
        time_s, number = min((s, i) for i, (s, held) in self.front.items() if held <= memory_bytes)
        assert time_s > 0
        return strategy_at(self.space, number)[1]


@cache
def sweep(name: str, *changes: str) -> Found:
    """The exact front of a shipped space, changed as by `--set`; kept, for several files of tests ask for it."""
    plan = prepare(load_space(name, changes))
    ids, columns = final_front(plan, sweep_plan(plan))
    rows = zip(*(columns[o.column] for o in plan.space.objectives), strict=True)
    front = {int(i): tuple(map(float, row)) for i, row in zip(ids, rows, strict=True)}
    return Found(plan.space, plan.enumeration.legal, front)


def priced(space: Space, strategy: Strategy) -> StepResult:
    """What `evaluate` says of one layout."""
    return evaluate(space.model, strategy, space.system, space.workload)


def predicted(result: StepResult) -> str:
    """Step time, MFU and allocated memory of the worst stage."""
    memory = float(result.peak_memory_bytes) / GIB
    return f"{float(result.step_time_s):#.3g} s, {100 * float(result.mfu):.1f} %, {memory:.1f} GiB"


def layout(s: Strategy) -> str:
    """What is not off, in the table's words."""
    sizes = {"tp": s.tp, "cp": s.cp, "pp": s.pp, "vpp": s.vpp, "ep": s.ep}
    words = [f"{name} {int(size)}" for name, size in sizes.items() if np.all(size > 1)]
    schedules = {Schedule.DUALPIPE: ["DualPipe"], Schedule.ZB_H1: ["ZB-H1"], Schedule.GPIPE: ["GPipe"]}
    return ", ".join([*words, *schedules.get(s.schedule, []), f"ZeRO-{int(s.zero_stage)}"])


def difference(reference: StepResult, best: StepResult) -> str:
    """Seconds by which parts of a step differ, the largest first."""
    by = {
        part: sum(float(getattr(best, n)) - float(getattr(reference, n)) for n in names)
        for part, names in PARTS.items()
    }
    told = sorted(((d, part) for part, d in by.items() if abs(d) >= LEAST_TOLD), key=lambda pair: -abs(pair[0]))
    return ", ".join(f"{part} {seconds:+.2f}" for seconds, part in told)


def row(found: Found, reference: str) -> str:
    """One row of the table of references."""
    space = found.space
    mine = priced(space, space.references[reference])
    strategy = found.best(float(mine.peak_memory_bytes))
    best = priced(space, strategy)
    label = REFERENCES[space.name, reference]
    if float(best.step_time_s) == float(mine.step_time_s):
        return f"| {label} | {predicted(mine)} | the same | on the front itself |"
    return f"| {label} | {predicted(mine)} | {predicted(best)}: {layout(strategy)} | {difference(mine, best)} |"


def counted(found: Found) -> str:
    """Legal candidates in words, and the size of the front: two cells of the table of spaces."""
    legal = f"{found.legal:,}"
    for size, word in ((1e6, "million"), (1e9, "billion")):
        if found.legal >= size:
            legal = f"{found.legal / size:.{0 if word == 'million' else 1}f} {word}"
    return f"{legal} | {len(found.front)}"


def rewritten(text: str, found: Found) -> str:
    """The README with the rows of one space made anew."""
    lines = text.splitlines(keepends=True)
    for reference in found.space.references:
        label = REFERENCES[found.space.name, reference]
        (at,) = (i for i, line in enumerate(lines) if line.startswith(f"| {label} |"))
        lines[at] = row(found, reference) + "\n"
    (at,) = (i for i, line in enumerate(lines) if line.startswith(f"| `{found.space.name}` |"))
    cells = lines[at].split(" | ")
    lines[at] = " | ".join([*cells[:2], counted(found), *cells[4:]])
    return "".join(lines)


if __name__ == "__main__":
    readme = Path(__file__).parents[1] / "README.md"
    for name in SPACES:
        readme.write_text(rewritten(readme.read_text(encoding="utf-8"), sweep(name)), encoding="utf-8")
