"""Graphs as files: each is read back by the program that it is for, and says what the graph has."""

from __future__ import annotations

import io
import json
import re
import warnings
from html.parser import HTMLParser

import duckdb
import numpy as np
import onnx
import openpyxl
import pydot
import pytest

import spaces
from estimator.build import build
from estimator.graph import BlockKind
from estimator.inventory import inventory
from estimator.model_io import load_model
from estimator.op import OpKind, Phase
from estimator.part import Part, part_names
from estimator.passes import lower, recompute
from estimator.passes.differentiate import differentiate
from estimator.precision import recipe
from estimator.strategy import Fusion, Recompute, Strategy
from hardware.catalog import chip
from results.chrome_trace import write_trace
from results.colours import PART_COLOURS, TRACE_NAMES
from results.graph_export import GraphView
from results.graph_export.dot import dot_text
from results.graph_export.onnx_model import onnx_bytes
from results.graph_export.page import page
from results.graph_export.rows import OP_FIELDS, op_table, write_parquet
from results.graph_export.trace import laid_out
from results.graph_export.workbook import workbook_bytes
from results.parquet import read_table

MODELS = ("llama3_8b", "deepseek_v3", "nemotron_h_56b", "gpt_oss_120b", "deepseek_v4_flash", "gpt3_175b")
BF16 = recipe("bf16")


def logical(name="deepseek_v3"):
    graph = build(load_model(name, [spaces.MODELS]), 4096)
    return GraphView(name=name, told="one sequence", graph=graph, recipe=BF16,
                     entries=inventory(graph, BF16, chip("h100")))  # fmt: skip


def of_a_rank(name="deepseek_v3"):
    strategy = Strategy(tp=2, sequence_parallel=True, fusion=tuple(Fusion))
    graph = lower(build(load_model(name, [spaces.MODELS]), 4096), strategy, BF16)
    graph = recompute(graph, Recompute.parse("selective"))
    entries = inventory(graph, BF16, chip("h100"), lambda op: 1e-6)
    return GraphView(name=name, told="one rank", graph=graph, recipe=BF16, entries=entries)


def parsed(text):
    """What pydot reads; it calls its parser by names that the parser's newest version has renamed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        (graph,) = pydot.graph_from_dot_data(text)
    return graph


MAKERS = (logical, of_a_rank)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", MODELS)
def test_onnx_is_checked_and_has_every_op_of_every_phase_with_its_attributes(name, make):
    view = make(name)
    content = onnx_bytes(view)
    assert content == onnx_bytes(view)
    model = onnx.load(io.BytesIO(content))
    onnx.checker.check_model(model, full_check=True)
    calls = [node.op_type for node in model.graph.node if node.op_type != "Sum"]
    ahead = [kind.value for kind in view.graph.sequence]
    learns = any(entry.op.phase is not Phase.FORWARD for entry in view.entries)
    assert calls == ahead + [f"{kind}.backward" for kind in reversed(ahead) if learns]
    told = {}
    for function in model.functions:
        kind = function.name.removesuffix(".backward")
        told |= {(kind, node.name): node for node in function.node if node.op_type != "Sum"}
    assert len(told) == len(view.entries)
    for entry in view.entries:
        phase = entry.op.phase
        node = told[entry.block.kind.value, entry.op.name + (".recompute" if phase is Phase.RECOMPUTE else "")]
        said = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert said["phase"].decode() == phase.value
        assert said["flops"] == round(entry.flops)
        assert said["read_bytes"] == round(entry.read_bytes)
        assert said["part"].decode() == entry.part.value
        assert said["scope"].decode() == "/".join(entry.scope)
        assert list(said.get("axes", [])) == [dim.axis.value.encode() for dim in entry.op.dims]
        assert said["seconds"] == pytest.approx(entry.seconds, rel=1e-6)  # float32
        if entry.op.kind is not OpKind.COLLECTIVE and phase is Phase.FORWARD:
            assert list(node.input) == [*entry.op.inputs, *(w.name for w in entry.op.weights)]
    phases = {prop.key: prop.value for prop in model.metadata_props}["phases"].split(", ")
    assert set(phases) == {entry.op.phase.value for entry in view.entries}


def with_gradients(name="llama3_8b"):
    graph = differentiate(build(load_model(name, [spaces.MODELS]), 4096))
    return GraphView(name=name, told="one sequence", graph=graph, recipe=BF16, entries=inventory(graph, BF16))


def test_onnx_gives_a_gradient_of_every_weight_of_the_model():
    model = onnx.load(io.BytesIO(onnx_bytes(with_gradients())))
    weights = {given.name: given for given in model.graph.input if given.name.endswith("weight")}
    gradients = {made.name: made for made in model.graph.output if made.name.endswith(".weight.grad")}
    assert len(weights) == 2 * 1 + 32 * 9 + 1
    short = {name.split(".", 1)[-1] if name.startswith(("head.", "embedding.")) else name: g.type
             for name, g in gradients.items()}  # fmt: skip
    assert {f"{name}.grad" for name in weights} == set(short)
    assert all(short[f"{name}.grad"] == given.type for name, given in weights.items())


def test_gradients_of_onnx_are_chained_from_the_loss_to_the_first_block():
    model = onnx.load(io.BytesIO(onnx_bytes(with_gradients())))
    assert [given.name for given in model.graph.input if ".grad" in given.name] == ["head.loss.out.grad"]
    back = [node for node in model.graph.node if node.op_type.endswith(".backward")]
    assert len(back) == 34
    for before, after in zip(back, back[1:], strict=False):
        assert before.output[-1] in after.input
    forward = {name for node in model.graph.node if not node.op_type.endswith(".backward") for name in node.output}
    assert all(forward & set(node.input) for node in back[:-1])  # what forward kept


def test_a_gradient_sums_what_all_readers_send_back():
    (dense,) = [f for f in onnx.load(io.BytesIO(onnx_bytes(with_gradients()))).functions if f.name == "dense.backward"]
    nodes = {node.name: node for node in dense.node}
    block = with_gradients().graph.blocks[BlockKind.DENSE]
    readers = [op.name for op in block.of_phase(Phase.FORWARD) if "input_norm.out" in op.inputs]
    shares = {name for r in readers for name in nodes[f"{r}.grad"].output if name.startswith("input_norm.out.grad")}
    assert len(readers) == len(shares) == 3  # queries, keys and values
    assert shares < set(nodes["input_norm.grad"].input)


def test_onnx_has_every_weight_of_the_model_as_an_input():
    view = logical("llama3_8b")
    model = onnx.load(io.BytesIO(onnx_bytes(view)))
    sizes = [[d.dim_value for d in given.type.tensor_type.shape.dim] for given in model.graph.input]
    names = [given.name for given in model.graph.input]
    assert names[0] == "embedding.ids"
    assert sum(int(np.prod(size)) for size in sizes[1:]) == view.graph.num_parameters()
    assert "layers.31.mlp.up_proj.weight" in names
    assert len(set(names)) == len(names)


def test_layers_of_onnx_are_chained():
    model = onnx.load(io.BytesIO(onnx_bytes(logical("llama3_8b"))))
    calls = list(model.graph.node)
    for before, after in zip(calls, calls[1:], strict=False):
        assert after.input[0] == before.output[0]


@pytest.mark.parametrize("make", MAKERS)
def test_dot_parses_and_has_a_box_per_op_in_the_colour_of_its_part(make):
    view = make()
    graph = parsed(dot_text(view))
    clusters = {c.get_label().strip('"').split(",")[0]: c for c in graph.get_subgraphs()}
    assert set(clusters) == {kind.value for kind in view.graph.kinds}
    for kind in view.graph.kinds:
        forward = [e for e in view.entries if e.block.kind is kind and e.op.phase is Phase.FORWARD]
        boxes = [node for node in clusters[kind.value].get_nodes() if node.get("shape") != "ellipse"]
        assert [box.get_label().strip('"').split("\\n")[0] for box in boxes] == [e.op.name for e in forward]
        assert [box.get("fillcolor").strip('"') for box in boxes] == [PART_COLOURS[e.part] for e in forward]
        others = [e for e in view.entries if e.block.kind is kind and e.op.phase is not Phase.FORWARD]
        inner = clusters[kind.value].get_subgraphs()
        assert len(inner) == bool(others)
        boxes = [node for c in inner for node in c.get_nodes() if node.get("shape") != "ellipse"]
        assert [box.get_label().strip('"').split("\\n")[0] for box in boxes] == [e.op.name for e in others]
        assert all(e.op.phase.value in box.get_label() for e, box in zip(others, boxes, strict=True))


def test_arrows_of_dot_are_the_tensors_between_ops():
    view = logical("llama3_8b")
    graph = parsed(dot_text(view))
    layer = next(c for c in graph.get_subgraphs() if c.get_label() == '"dense, 32 times"')
    name_of = {node.get_name(): node.get_label().strip('"').split("\\n")[0] for node in layer.get_nodes()}
    found = {(name_of[e.get_source()], name_of[e.get_destination()]) for e in layer.get_edges()}
    block, made, expected = view.graph.blocks[BlockKind.DENSE], {"x": "x"}, set()
    for op in block.ops:
        expected |= {(made[name], op.name) for name in op.inputs}
        made |= dict.fromkeys(op.outputs, op.name)
    assert found == expected


@pytest.mark.parametrize("name", ['a"b', "back\\slash", "ends in \\", "two\nlines", "<b>&"])
def test_names_of_any_characters_stay_whole(name):
    view = GraphView(**{f: getattr(logical("llama3_8b"), f) for f in ("told", "graph", "recipe", "entries")}, name=name)
    graph = parsed(dot_text(view))
    assert len(graph.get_subgraphs()) == 3
    read = _Page()
    read.feed(page(view))
    assert " ".join(name.split()) in " ".join(" ".join(read.said).split())
    assert "b" not in read.tags


@pytest.mark.parametrize("make", MAKERS)
def test_a_workbook_has_formulas_in_letters_and_in_numbers_that_come_to_the_amounts(make):
    view = make()
    content = workbook_bytes(view)
    assert content == workbook_bytes(view)
    book = openpyxl.load_workbook(io.BytesIO(content))
    values = openpyxl.load_workbook(io.BytesIO(content), data_only=True)
    sizes = {row[0]: row[1] for row in values["sizes"].iter_rows(min_row=2, values_only=True)}
    assert set(book.defined_names) == set(sizes)
    for name in sizes:
        assert re.fullmatch(r"sizes!\$B\$\d+", book.defined_names[name].attr_text)
    head, *rows = list(book["ops"].iter_rows(values_only=True))
    cached = list(values["ops"].iter_rows(min_row=2, values_only=True))
    assert len(rows) == len(view.entries)
    for entry, row, value in zip(view.entries, rows, cached, strict=True):
        cell, worked_out = dict(zip(head, row, strict=True)), dict(zip(head, value, strict=True))
        assert (cell["op"], cell["phase"], cell["bound"]) == (entry.op.name, entry.op.phase.value, entry.bound or None)
        for title, amount in (("FLOPs", "flops"), ("bytes read", "read_bytes"), ("bytes written", "written_bytes")):
            exact = pytest.approx(getattr(entry, amount), rel=1e-12)
            assert cell[title] == f"={cell[f'{title} in letters']}"
            assert worked_out[title] == exact
            assert eval(cell[f"{title} in letters"], {}, sizes) == exact
            assert eval(cell[f"{title} in numbers"], {}, {}) == exact
    scopes = {row[0]: row for row in values["scopes"].iter_rows(min_row=2, values_only=True)}
    assert scopes[view.name][3] == pytest.approx(sum(e.amount("flops") for e in view.entries), rel=1e-12)


def test_a_table_has_a_row_per_op_and_its_units(tmp_path):
    view = of_a_rank()
    path = tmp_path / "ops.parquet"
    write_parquet(path, view)
    table, written = op_table(view), read_table(path, OP_FIELDS)
    assert repr(list(table.rows())) == repr(list(written.rows()))  # NaN is NaN
    flops = duckdb.sql(f"select sum(flops * times) from '{path}' where phase = 'forward'").fetchall()[0][0]
    assert flops == pytest.approx(
        sum(e.amount("flops") for e in view.entries if e.op.phase is Phase.FORWARD), rel=1e-12
    )
    assert all(np.isfinite(table["seconds"]))


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags, self.said, self.links, self.depth = [], [], [], 0

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in {"src", "href", "action", "data"}]
        self.depth += tag not in {"meta", "br"}

    def handle_endtag(self, tag):
        self.depth -= 1

    def handle_data(self, data):
        self.said.append(data)


@pytest.mark.parametrize("make", MAKERS)
def test_a_page_needs_nothing_else_and_folds_every_scope(make):
    view = make()
    text = page(view)
    read = _Page()
    read.feed(text)
    assert read.depth == 0
    assert read.links == []
    assert "script" not in read.tags
    assert not re.search(r"https?:|url\(|@import", text)
    scopes = {entry.scope[:n] for entry in view.entries for n in range(len(entry.scope) + 1)}
    assert read.tags.count("details") >= len(scopes)
    said = set(read.said)
    assert {entry.op.name for entry in view.entries} <= said
    for part in {entry.part for entry in view.entries}:
        assert f"background:{PART_COLOURS[part]}" in text


def test_a_trace_runs_every_op_as_often_as_the_model_does_in_the_colour_of_its_part(tmp_path):
    view = of_a_rank("llama3_8b")
    timeline = laid_out(view)
    assert timeline.span_s == pytest.approx(sum(entry.amount("seconds") for entry in view.entries), rel=1e-9)
    write_trace(tmp_path / "t.json", timeline, subject="probe", parts=part_names(view.graph))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X" and e["cat"] != "pass"]
    assert len(slices) == sum(entry.times for entry in view.entries)
    part_of = {entry.op.name: entry.part for entry in view.entries}
    assert all(e["cname"] == TRACE_NAMES[part_of[e["name"]]] for e in slices)
    in_order = [e["name"] for e in sorted(slices, key=lambda e: e["ts"])]
    assert in_order[:3] == ["embed", "embed.reduce", "input_norm"]
    assert in_order[-1] == "embed.grad"


def test_a_trace_of_what_is_not_priced_is_refused():
    graph = build(load_model("llama3_8b", [spaces.MODELS]), 128)
    view = GraphView(name="x", told="", graph=graph, recipe=BF16, entries=inventory(graph, BF16))
    with pytest.raises(ValueError, match="a trace needs seconds, but nothing is priced"):
        laid_out(view)


def test_every_part_has_a_name_that_chrome_knows_and_no_two_share_it():
    assert set(TRACE_NAMES) == set(Part)
    assert len(set(TRACE_NAMES.values())) == len(Part)


@pytest.mark.parametrize(("package", "write"), [("onnx", onnx_bytes), ("xlsxwriter", workbook_bytes)])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, package, write):
    monkeypatch.setattr("results.graph_export.view.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"needs {package}, .*pip install 'trainspace\[report\]'"):
        write(logical("llama3_8b"))
