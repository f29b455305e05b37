"""`search capture`: the graph of a Hugging Face model, from its config.json alone."""

from __future__ import annotations

import argparse
import time

from estimator.captured import CapturedModel
from estimator.graph_file import graph_text
from hardware.units import format_bytes, format_count, format_seconds
from results.report.text import columns
from search.commands.answer import answer, check_writable, tell, write

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Captures, writes the graph to the file of -o (else to standard output), and tells what it has."""
    from capture.model import capture_model

    if args.output is not None:
        check_writable(args, args.output)
    start = time.perf_counter()
    model = capture_model(args.config, phase=args.phase, num_layers=args.layers, allow_unknown=args.allow_unknown,
                          trust_remote_code=args.trust_remote_code)  # fmt: skip
    seconds = time.perf_counter() - start
    content = graph_text(model)
    for name in model.captured.unknown:
        tell(f"search: {name} is unknown and priced as memory-bound")
    write(args, content)
    if args.output is None:
        return 0
    told = argparse.Namespace(**{**vars(args), "output": None})
    facts = (args.output, model, len(content), seconds)
    answer(told, text=_text(*facts), data=_data(*facts))
    return 0


def _text(path: str, model: CapturedModel, nbytes: int, seconds: float) -> str:
    graph = model.captured.graph
    rows = [[kind.value, str(graph.sequence.count(kind)), str(len(block.ops)),
             format_count(sum(float(w.elements) for w in block.weights))]
            for kind, block in graph.blocks.items()]  # fmt: skip
    head = (f"{model.name}, {model.captured.phase}: {format_count(float(graph.num_parameters()))} parameters; "
            f"{format_bytes(nbytes)} in {path}, {format_seconds(seconds)}")  # fmt: skip
    notes = [f"note: {note}" for note in model.notes]
    return "\n".join([head, *notes, "", *columns(["block", "times", "ops", "parameters"], rows)]) + "\n"


def _data(path: str, model: CapturedModel, nbytes: int, seconds: float) -> dict[str, object]:
    graph = model.captured.graph
    return {
        "graph": path, "name": model.name, "phase": model.captured.phase, "graph_bytes": nbytes, "capture_s": seconds,
        "num_parameters": float(graph.num_parameters()), "notes": list(model.notes),
        "unknown": list(model.captured.unknown),
        "blocks": [{"kind": kind.value, "times": graph.sequence.count(kind), "ops": len(block.ops)}
                   for kind, block in graph.blocks.items()],
    }  # fmt: skip
