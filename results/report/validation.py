"""The report of `search validate` as text: families, the worst rows and where their time goes, what was skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results.report.text import hanging

__all__ = ["validation_table"]

Report = Mapping[str, Any]
NUM_PARTS = 5  # of a step's seconds, the largest
NUM_NAMED = 3  # rows that share a reason, by name
SMALL = 0.005  # share of a step below which a part is not told


def validation_table(report: Report) -> str:
    """Lines for a terminal; the numbers are those of the JSON form."""
    scored = {name: family for name, family in report["families"].items() if family["n"]}
    names = max([20, *(len(name) + 1 for name in scored)])
    lines = [
        f"{'family':<{names}}{'n':>5}{'mape':>8}{'median':>8}{'p90':>8}{'bias':>8}{'mem mape':>10}"
        f"{'groups':>8}{'tau':>7}{'regret':>8}"
    ]
    lines += [_summary_line(f"{name:<{names}}", family) for name, family in sorted(scored.items())]
    lines.append(_summary_line(f"{'all':<{names}}", report["overall"]))
    lines += [*_mean_line(scored), *_bands_line(report), *_sources_line(report), *_worst_lines(report)]
    num_skipped = sum(report["skipped"].values())
    unscored = report["rows"] - report["scored"] - num_skipped
    lines += ["", f"{report['rows']} rows: {report['scored']} scored, {unscored} incomplete, {num_skipped} skipped"]
    for reason, count in report["skipped"].items():
        named = [case["case_id"] for case in report["cases"] if case["skipped"] == reason]
        more = ", ..." if count > NUM_NAMED else ""
        lines += hanging(f"{count:>6} skipped: ", f"{reason} ({', '.join(named[:NUM_NAMED])}{more})")
    return "\n".join(lines) + "\n"


def _mean_line(families: Mapping[str, Any]) -> list[str]:
    errors = [family["step_time"]["mape"] for family in families.values()]
    known = [error for error in errors if error is not None]
    return [f"mean of {len(known)} families: {sum(known) / len(known):.1%}"] if len(known) > 1 else []


def _bands_line(report: Report) -> list[str]:
    bands = report["overall"]["bands"]
    if bands["inside"] is None:
        return []
    half = bands["median_width"] / 2
    told = f"P10 to P90 hold {bands['inside']:.0%} of the steps; they reach {half:.1%} to either side in the middle"
    over = bands["width_over_error"]
    return [told if over is None else f"{told}, {over / 2:.1f} times the median error"]


def _sources_line(report: Report) -> list[str]:
    shares = {name: share for name, share in report["overall"]["price_sources"].items() if share is not None}
    told = ", ".join(f"{share:.0%} {name}" for name, share in shares.items())
    return [f"seconds of kernels rest on: {told}"] if shares else []


def _worst_lines(report: Report) -> list[str]:
    """The rows that are furthest off."""
    if not report["overall"]["worst"]:
        return []
    width = max(len(row["case_id"]) for row in report["overall"]["worst"])
    lines = ["", f"{'worst rows':<{width}}{'predicted s':>13}{'measured s':>12}{'error':>9}  where the prediction goes"]
    for row in report["overall"]["worst"]:
        step, measured = row["predicted_step_time_s"], row["measured_step_time_s"]
        parts = [(name, seconds) for name, seconds in row["seconds"].items() if seconds >= SMALL * step][:NUM_PARTS]
        told = ", ".join(f"{name} {seconds / step:.0%}" for name, seconds in parts)
        lines.append(f"{row['case_id']:<{width}}{step:>13.4g}{measured:>12.4g}{row['error']:>+9.1%}  {told}")
    return lines


def _summary_line(name: str, summary: Mapping[str, Any]) -> str:
    step, memory, ranking = summary["step_time"], summary["memory"], summary["ranking"]

    def percent(value: float | None, width: int, sign: str = "") -> str:
        return f"{'-' if value is None else format(value, f'{sign}.1%'):>{width}}"

    tau = "-" if ranking["tau"] is None else f"{ranking['tau']:.2f}"
    return (
        f"{name}{summary['n']:>5}{percent(step['mape'], 8)}{percent(step['median_ape'], 8)}"
        f"{percent(step['p90_ape'], 8)}{percent(step['bias'], 8, '+')}{percent(memory['mape'], 10)}"
        f"{ranking['groups']:>8}{tau:>7}{percent(ranking['regret'], 8)}"
    )
