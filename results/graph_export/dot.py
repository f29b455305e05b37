"""A graph as DOT (graphviz): a box per block with its ops, coloured by part, and the tensors between them as arrows.

What runs again and gradients have a box of their own inside, each op with its phase; dashed arrows bring what was kept.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import groupby

from estimator.graph import BlockKind
from estimator.inventory import Entry
from estimator.op import OpKind, Phase
from hardware.units import format_bytes, format_count, format_seconds
from results.colours import BLACK, LINE, PART_COLOURS, RULE, on
from results.graph_export.view import GraphView, kind_of
from results.graph_export.wiring import Wire, wired

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
    drawn = [_Drawn(i, view, kind) for i, kind in enumerate(kinds)]
    for block, kind in zip(drawn, kinds, strict=True):
        times = view.graph.sequence.count(kind)
        lines += [f"  subgraph cluster_{block.number} {{", f"    label={_quoted(f'{kind.value}, {_often(times)}')};",
                  f"    color={_quoted(RULE)};", *(f"    {line}" for line in block.ahead()), *block.behind(),
                  "  }"]  # fmt: skip
    places = [(kinds.index(kind), len(list(run))) for kind, run in groupby(view.graph.sequence)]
    for (here, _), (there, times) in zip(places, places[1:], strict=False):
        label = f" [label={_quoted(_often(times))} ltail=cluster_{here} lhead=cluster_{there} style=bold]"
        lines.append(f"  {drawn[here].last} -> b{there}_in{label};")
        if drawn[there].gradient and drawn[here].enters:
            lines.append(f"  {drawn[there].gradient} -> g{here}_in [style=bold];")
    return "\n".join([*lines, "}"]) + "\n"


class _Drawn:
    """One block: its forward ops, and behind them what runs again and gradients."""

    def __init__(self, number: int, view: GraphView, kind: BlockKind) -> None:
        self.number, self.block = number, view.graph.blocks[kind]
        mine = [e for e in view.entries if e.block.kind is kind]
        self.forward, self.back = (wired(self.block, mine, backward=back) for back in (False, True))
        self.made = {self.block.input: f"b{number}_in"}
        self.last = f"b{number}_{len(self.forward.wires) - 1}" if self.forward.wires else f"b{number}_in"
        self.gradient = ""  # the op that makes the gradient of what enters
        self.enters = any(self.is_gradient(name) for name in self.back.given)

    def is_gradient(self, name: str) -> bool:
        return self.back.of[name] != name

    def ahead(self) -> Iterator[str]:
        """Nodes of the forward ops and of what enters; an arrow per tensor from the op that made it last."""
        entry = f"b{self.number}_in"
        yield f"{entry} [label={_quoted(self.block.input)} shape=ellipse fillcolor=white];"
        yield from self.ops(self.forward.wires, "b", entry)

    def behind(self) -> Iterator[str]:
        """The box of all other ops."""
        if not self.back.wires:
            return
        yield f"    subgraph cluster_{self.number}_back {{"
        told = "what runs again, and gradients"
        yield f"      label={_quoted(told)}; style=dashed; color={_quoted(RULE)};"
        entry = f"g{self.number}_in"
        if self.enters:
            yield f"      {entry} [label={_quoted('gradient of what comes out')} shape=ellipse fillcolor=white];"
        self.made |= {name: entry for name in self.back.given if self.is_gradient(name)}
        kept = set(self.made)
        yield from (f"      {line}" for line in self.ops(self.back.wires, "g", "", kept))
        yield "    }"
        self.gradient = self.made.get(self.back.gradients[-1], "") if self.back.gradients else ""

    def ops(self, wires: Sequence[Wire], letter: str, before: str, kept: Container[str] = ()) -> Iterator[str]:
        for n, wire in enumerate(wires):
            entry, node = wire.entry, f"{letter}{self.number}_{n}"
            fill = PART_COLOURS[entry.part]
            yield f"{node} [label={_quoted(_label(entry))} fillcolor={_quoted(fill)} fontcolor={_quoted(on(fill))}];"
            is_traffic = entry.op.kind is OpKind.COLLECTIVE
            for name in () if is_traffic else wire.inputs:
                if name in self.made:
                    yield f"{self.made[name]} -> {node} [{self._told(name, name in kept)}];"
            if before and (is_traffic or not wire.inputs):
                yield f"{before} -> {node} [style=dashed];"
            self.made.update(dict.fromkeys(wire.outputs, node))
            before = node

    def _told(self, name: str, is_kept: bool) -> str:
        of = self.back.of.get(name, name)
        tensor = self.block.tensors.get(of)
        sizes = "" if tensor is None else " x ".join(f"{float(dim.size):.10g}" for dim in tensor.dims)
        return f"label={_quoted(sizes)} tooltip={_quoted(name)}" + (" style=dashed" if is_kept else "")


def _often(times: int) -> str:
    return "once" if times == 1 else f"{times} times"


def _label(entry: Entry) -> str:
    amounts = [f"{format_count(entry.flops)} FLOPs" if entry.flops else "",
               format_bytes(entry.read_bytes + entry.written_bytes + entry.link_bytes),
               f"{format_seconds(entry.seconds)} ({entry.bound})" if entry.bound else ""]  # fmt: skip
    kind = kind_of(entry.op) if entry.op.phase is Phase.FORWARD else f"{kind_of(entry.op)}, {entry.op.phase.value}"
    return f"{entry.op.name}\n{kind}\n{', '.join(word for word in amounts if word)}"


def _quoted(text: str) -> str:
    """A string of the DOT language: quotes and backslashes are escaped, a line break is one."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
