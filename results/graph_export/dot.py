"""A graph as DOT (graphviz): a box per block with its ops, coloured by part, and the tensors between them as arrows.

Forward and what is recomputed with it: gradients follow the same arrows backwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from estimator.graph import Block
from estimator.inventory import Entry
from estimator.op import Phase
from hardware.units import format_bytes, format_count, format_seconds
from results.colours import BLACK, LINE, PART_COLOURS, RULE, on
from results.graph_export.view import GraphView, kind_of

__all__ = ["dot_text"]


def dot_text(view: GraphView) -> str:
    """The file's content."""
    kinds = view.graph.kinds
    lines = [
        f"digraph {_quoted(view.name)} {{",
        f"  compound=true; labelloc=t; label={_quoted(f'{view.name}: {view.told}')};",
        "  node [shape=box style=filled fontname=sans fontsize=10];",
        f"  edge [fontname=sans fontsize=8 color={_quoted(LINE)} fontcolor={_quoted(BLACK)}];",
    ]
    for i, kind in enumerate(kinds):
        block, mine = view.graph.blocks[kind], [e for e in view.entries if e.block.kind is kind]
        times = view.graph.sequence.count(kind)
        lines += [f"  subgraph cluster_{i} {{", f"    label={_quoted(f'{kind.value}, {_often(times)}')};",
                  f"    color={_quoted(RULE)};"]  # fmt: skip
        lines += [f"    {line}" for line in _block_lines(i, block, [e for e in mine if e.op.phase is Phase.FORWARD])]
        lines.append("  }")
    places = [(kinds.index(kind), len(list(run))) for kind, run in groupby(view.graph.sequence)]
    for (here, _), (there, times) in zip(places, places[1:], strict=False):
        tail, head = _last(here, view), f"b{there}_in"
        label = f" [label={_quoted(_often(times))} ltail=cluster_{here} lhead=cluster_{there} style=bold]"
        lines.append(f"  {tail} -> {head}{label};")
    return "\n".join([*lines, "}"]) + "\n"


def _block_lines(number: int, block: Block, entries: list[Entry]) -> Iterator[str]:
    """Nodes of the ops and of what enters; an arrow per tensor from the op that made it last."""
    yield f"b{number}_in [label={_quoted(block.input)} shape=ellipse fillcolor=white];"
    made, before = {block.input: f"b{number}_in"}, f"b{number}_in"
    for n, entry in enumerate(entries):
        node, fill = f"b{number}_{n}", PART_COLOURS[entry.part]
        yield f"{node} [label={_quoted(_label(entry))} fillcolor={_quoted(fill)} fontcolor={_quoted(on(fill))}];"
        for name in entry.op.inputs:
            if name in made:
                sizes = " x ".join(f"{float(dim.size):.10g}" for dim in block.tensors[name].dims)
                yield f"{made[name]} -> {node} [label={_quoted(sizes)} tooltip={_quoted(name)}];"
        if not entry.op.inputs:  # traffic of the op before it
            yield f"{before} -> {node} [style=dashed];"
        made.update(dict.fromkeys(entry.op.outputs, node))
        before = node


def _last(number: int, view: GraphView) -> str:
    kind = view.graph.kinds[number]
    count = sum(1 for _ in view.graph.blocks[kind].of_phase(Phase.FORWARD))
    return f"b{number}_{count - 1}" if count else f"b{number}_in"


def _often(times: int) -> str:
    return "once" if times == 1 else f"{times} times"


def _label(entry: Entry) -> str:
    amounts = [f"{format_count(entry.flops)} FLOPs" if entry.flops else "",
               format_bytes(entry.read_bytes + entry.written_bytes + entry.link_bytes),
               f"{format_seconds(entry.seconds)} ({entry.bound})" if entry.bound else ""]  # fmt: skip
    return f"{entry.op.name}\n{kind_of(entry.op)}\n{', '.join(word for word in amounts if word)}"


def _quoted(text: str) -> str:
    """A string of the DOT language: quotes and backslashes are escaped, a line break is one."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
