"""`search graph show`: trees, parts and sources of what a target names, and one line for what is none."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest

import spaces
from estimator.build import build
from estimator.hierarchy import METRICS
from estimator.model_io import load_model
from estimator.part import Part
from results.colours import PART_COLOURS
from search.commands.ops import price_ops
from search.commands.point import read_point
from tests.capture.captured import config_file


@pytest.fixture
def graph(search, tmp_path):
    """A captured graph in graph.json."""
    config_file(tmp_path, "deepseek_v3")
    assert search("capture", "config.json", "-o", "graph.json").code == 0
    return "graph.json"


def rows_of(said):
    assert (said.code, said.err) == (0, "")
    return {row["scope"]: row for row in json.loads(said.out)["rows"]}


def test_a_model_is_shown_as_a_tree_that_sums_up(search):
    rows = rows_of(search("graph", "show", "llama3_8b", "--depth", "3", "--json"))
    model = build(load_model("llama3_8b", [spaces.MODELS]), 4096)
    assert rows[""]["parameters"] == model.num_parameters()
    for metric in set(METRICS) - {"seconds"}:
        below = [row[metric] for row in rows.values() if row["depth"] == 1]
        assert sum(below) == pytest.approx(rows[""][metric], rel=1e-12)
    assert rows["layers/dense"]["times"] == 32
    assert rows["layers/dense/mlp"]["flops"] > rows["layers/dense/input_norm"]["flops"]
    assert rows[""]["seconds"] is None


def test_text_is_indented_by_depth_and_a_metric_has_shares(search):
    said = search("graph", "show", "llama3_8b", "--depth", "2", "--metric", "flops")
    lines = said.out.splitlines()
    assert lines[1].startswith("one sequence of 4096 tokens, forward, bf16")
    table = [line for line in lines[5:] if line]
    assert table[0].split()[0] == "llama3_8b"
    assert "100.0%" in table[0]
    assert table[1].startswith("  embedding ")
    assert table[3].startswith("  layers ")
    assert table[4].startswith("    dense ")
    assert table[3].endswith("#" * 28)


def test_parts_have_names_and_one_table_of_colours(search):
    said = search("graph", "show", "deepseek_v3", "--by", "part", "--json")
    rows = rows_of(said)
    assert set(rows) - {""} <= {part.value for part in Part}
    assert rows["shared_experts"]["flops"] > 0
    assert sum(row["ops"] for scope, row in rows.items() if scope) == rows[""]["ops"]
    assert json.loads(said.out)["colours"] == {part.value: colour for part, colour in PART_COLOURS.items()}


def test_a_configuration_shows_the_ops_of_one_rank_as_the_estimate_lists_them(search):
    rows = rows_of(search("graph", "show", "deepseek_v3:published", "--depth", "9", "--json"))
    listed = price_ops(read_point("deepseek_v3:published", None, []))
    assert rows[""]["ops"] == sum(op.times for op in listed)
    assert rows[""]["seconds"] == pytest.approx(sum(op.times * op.seconds for op in listed), rel=1e-12)
    assert rows[""]["link_bytes"] == pytest.approx(sum(op.times * op.link_bytes for op in listed), rel=1e-12)


def test_traffic_of_groups_of_one_is_no_traffic(search):
    words = ("deepseek_v3:published", "--json")
    (alone,) = [row for row in json.loads(search("graph", "show", *words, "--by", "part").out)["rows"]
                if row["scope"] == "communication"]  # fmt: skip
    listed = [op for op in price_ops(read_point(words[0], None, [])) if op.link_bytes]
    assert {op.kind for op in listed} == {"all_to_all ep"}  # tp, cp and etp are 1
    assert alone["link_bytes"] == pytest.approx(sum(op.times * op.link_bytes for op in listed), rel=1e-12)
    behind = json.loads(search("graph", "passes", *words).out)["passes"][-1]
    assert behind["link_bytes"] == pytest.approx(alone["link_bytes"], rel=1e-12)


def test_a_copy_sends_nothing_ahead_and_its_gradient_all_of_it(search):
    set_tp = ("--set", "strategy.tp=2", "--set", "strategy.sequence_parallel=false")
    sent = {op["name"]: (op["kind"], op["link_bytes"]) for op in json.loads(
        search("estimate", "llama3_8b_small:fully_sharded", *set_tp, "--ops", "--json").out)["ops"]}  # fmt: skip
    copies = {name: told for name, told in sent.items() if told[0] == "copy tp"}
    assert copies
    assert all(told[1] == 0.0 for told in copies.values())
    assert all(sent[f"{name}.grad"][1] > 0.0 for name in copies if f"{name}.grad" in sent)


def test_what_runs_again_is_an_op_of_its_own(search):
    phases = []
    for recompute in ("none", "full"):
        words = ("llama3_8b_small:fully_sharded", "--set", f"strategy.recompute={recompute}", "--to", "csv")
        said = search("graph", "export", *words)
        assert said.code == 0, said.err
        phases.append([row["phase"] for row in csv.DictReader(io.StringIO(said.out))])
    assert [told.count("recompute") > 0 for told in phases] == [False, True]
    assert [told.count("forward") for told in phases] == [phases[0].count("forward")] * 2


def test_csv_has_a_line_per_scope(search):
    said = search("graph", "show", "llama3_8b", "--depth", "1", "--chip", "h100", "--csv")
    lines = list(csv.DictReader(io.StringIO(said.out)))
    assert [line["scope"] for line in lines] == ["", "embedding", "layers", "head"]
    assert float(lines[0]["seconds"]) == pytest.approx(sum(float(line["seconds"]) for line in lines[1:]))


def test_gradients_are_there_when_asked_for(search):
    forward = rows_of(search("graph", "show", "llama3_8b", "--json"))[""]["flops"]
    both = rows_of(search("graph", "show", "llama3_8b", "--backward", "--json"))[""]["flops"]
    assert 2.9 < both / forward < 3.1  # two products for each; streaming ops differ (passes/differentiate.py)


def test_every_op_of_a_captured_graph_tells_where_it_comes_from(search, graph):
    said = search("graph", "show", graph, "--source", "--json")
    sources = {row["op"]: row for row in json.loads(said.out)["sources"]}
    found = sources["model.layers.1/attention.q_b_proj"]
    (place,) = found["places"]
    assert place["ops"] == {"aten.mm.default": 1}
    assert (place["module"], place["scope"]) == ("Linear", "model.layers.1.self_attn.q_proj")
    assert place["line"].startswith("modeling_deepseek_v3.py:")
    (gradient,) = found["backward"]
    assert gradient["scope"] == place["scope"]
    assert gradient["ops"]["aten.mm.default"] == 2
    text = " ".join(search("graph", "show", graph, "--source").out.split())
    assert f"Linear model.layers.1.self_attn.q_proj, {place['line']}: aten.mm.default" in text


def test_a_captured_graph_and_its_config_are_shown_alike(search, graph):
    captured, built = (rows_of(search("graph", "show", name, "--json")) for name in (graph, "config.json"))
    assert {scope: row for scope, row in built.items() if scope.startswith("layers/")} == {
        scope: row for scope, row in captured.items() if scope.startswith("layers/")
    }


FORMATS = ("json", "dot", "onnx", "xlsx", "html", "csv", "parquet", "perfetto")


@pytest.mark.parametrize("to", FORMATS)
def test_a_graph_goes_to_a_file_of_every_format_and_no_file_is_replaced_unasked(search, graph, tmp_path, to):
    words = ("graph", "export", graph, "--to", to, "--chip", "h100", "-o", "out")
    said = search(*words, "--json")
    assert (said.code, said.err) == (0, "")
    told = json.loads(said.out)
    content = (tmp_path / "out").read_bytes()
    assert (told["format"], told["file_bytes"]) == (to, len(content))
    (tmp_path / "out").write_text("mine")
    refused = search(*words)
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
    assert "out: must not replace a file that exists; give another name, or --force to replace it" in refused.err
    assert (tmp_path / "out").read_text() == "mine"
    assert search(*words, "--force").code == 0
    assert (tmp_path / "out").read_bytes() == content


def test_a_captured_graph_is_exported_as_it_was_captured(search, graph, tmp_path):
    assert search("graph", "export", graph, "--to", "json").out == (tmp_path / graph).read_text()


@pytest.mark.parametrize("target", ["llama3_8b", "deepseek_v3", "deepseek_v3:published", "nemotron_h_56b"])
def test_an_exported_graph_is_read_back_exactly(search, tmp_path, target):
    assert search("graph", "export", target, "--to", "json", "-o", "a.json").code == 0
    assert search("graph", "export", "a.json", "--to", "json").out == (tmp_path / "a.json").read_text()
    shown, again = (rows_of(search("graph", "show", name, "--json")) for name in (target, "a.json"))
    without = [{k: v for k, v in row.items() if k not in {"seconds"}} for row in shown.values()]
    assert [{k: v for k, v in row.items() if k not in {"seconds"}} for row in again.values()] == without


def test_a_table_tells_the_place_behind_each_op_and_behind_its_gradients(search, graph):
    said = search("graph", "export", graph, "--to", "csv", "--backward")
    rows = list(csv.DictReader(io.StringIO(said.out)))
    assert {row["phase"] for row in rows} == {"forward", "backward", "weight_grad"}
    assert all(re.search(r"\w+\.py:\d+$", row["source"]) for row in rows)
    assert all(not row["source"] for row in csv.DictReader(io.StringIO(
        search("graph", "export", "config.json", "--to", "csv").out)))  # fmt: skip


@pytest.mark.parametrize("to", ["dot", "onnx"])
def test_pictures_and_onnx_hold_every_phase(search, tmp_path, to):
    said = search("graph", "export", "llama3_8b_small:fully_sharded", "--to", to, "-o", f"a.{to}")
    assert (said.code, said.err) == (0, "")
    phases = {op.phase for op in price_ops(read_point("llama3_8b_small:fully_sharded", None, []))}
    assert {"forward", "backward", "weight_grad"} <= phases
    content = (tmp_path / f"a.{to}").read_bytes()
    assert all(phase.encode() in content for phase in phases - {"forward"})


EXPORT_HOSTILE = {
    "binary without a file": (["llama3_8b", "--to", "onnx"], "onnx is no text, so a file must be named"),
    "json about no file": (["llama3_8b", "--to", "dot", "--json"], "so a file must be named"),
    "an unknown format": (["llama3_8b", "--to", "doc"], "invalid choice"),
    "no format": (["llama3_8b"], "--to"),
    "into no folder": (["llama3_8b", "--to", "csv", "-o", "no/where.csv"], "cannot write"),
    "onto its input": (["mine.json", "--to", "csv", "-o", "mine.json", "--force"], "must not replace the input"),
    "a trace of nothing priced": (["llama3_8b", "--to", "perfetto", "-o", "t"], "a trace needs seconds"),
    "ops of another length": (["mine.json", "--to", "csv", "--seq", "8"], "--seq is for a model or a configuration"),
    "ops that are broken": (["broken.json", "--to", "csv"], "broken.json: version must be 1, but got 7"),
}


@pytest.mark.parametrize("name", EXPORT_HOSTILE)
def test_bad_exports_are_one_line_and_2(search, tmp_path, name):
    assert search("graph", "export", "llama3_8b", "--to", "json", "-o", "mine.json").code == 0
    broken = json.loads((tmp_path / "mine.json").read_text()) | {"version": 7}
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    words, law = EXPORT_HOSTILE[name]
    said = search("graph", "export", *words)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert law in said.err


def test_a_config_and_its_capture_are_equal(search, tmp_path):
    config_file(tmp_path, "qwen3_moe")
    assert search("capture", "config.json", "-o", "graph.json").code == 0
    said = search("graph", "diff", "config.json", "graph.json")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[-1].startswith("equal: ")
    assert json.loads(search("graph", "diff", "config.json", "graph.json", "--json").out)["equal"] is True
    assert search("graph", "diff", "config.json", "graph.json", "--seq", "512", "--backward").out.count("equal: ") == 1


def test_a_difference_is_told_with_both_values(search, graph, tmp_path):
    changed = json.loads((tmp_path / graph).read_text())
    op = next(op for op in changed["blocks"][1]["ops"] if op["name"] == "mlp.up_proj")
    op["dims"][1][0] += 1
    del changed["blocks"][0]["ops"][0]["saves"]
    (tmp_path / "other.json").write_text(json.dumps(changed))
    said = search("graph", "diff", graph, "other.json")
    assert said.code == 0
    assert "equal" not in said.out
    assert "changed   layers/dense/mlp/up_proj, forward" in said.out
    told = json.loads(search("graph", "diff", graph, "other.json", "--json").out)
    assert told["equal"] is False
    found = {change["scope"]: change["fields"] for change in told["changed"]}
    assert set(found) == {"embedding/embed", "layers/dense/mlp/up_proj"}
    before, after = found["layers/dense/mlp/up_proj"]["dims"]
    assert after[1][0] == before[1][0] + 1
    assert told["b"]["flops"] > told["a"]["flops"]


def test_two_layouts_differ_in_their_traffic(search):
    words = (
        "deepseek_v3:published",
        "--set-b",
        "strategy.tp=2",
        "--set-b",
        "strategy.sequence_parallel=true",
        "--json",
    )
    told = json.loads(search("graph", "diff", "deepseek_v3:published", *words).out)
    assert told["a"]["flops"] > 1.8 * told["b"]["flops"]
    assert {op["kind"] for op in told["added"]} == {"collective"}


@pytest.mark.parametrize(
    ("words", "law"),
    [
        (["llama3_8b"], "required: B"),
        (["llama3_8b", "nothing"], "is neither a known name nor a file"),
        (["llama3_8b", "llama3_70b", "--set-a", "strategy.tp=2"], "--set changes a configuration"),
        (["llama3_8b", "deepseek_v3:published", "--seq", "8"], "--seq is for a model"),
    ],
)
def test_bad_comparisons_are_one_line_and_2(search, words, law):
    said = search("graph", "diff", *words)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert law in said.err


HOSTILE = {
    "no such thing": (["nothing"], "is neither a known name nor a file"),
    "a broken graph": (["cut.json"], "cut.json: must be"),
    "no model type": (["plain.json"], "plain.json: "),
    "sources of a model": (["llama3_8b", "--source"], "--source tells where captured operations come from"),
    "an unknown metric": (["llama3_8b", "--metric", "flop"], "--metric must be one of flops, "),
    "seconds without a chip": (["llama3_8b", "--metric", "seconds"], "name a chip with --chip"),
    "an unknown chip": (["llama3_8b", "--chip", "h1000"], "unknown chip"),
    "an unknown recipe": (["llama3_8b", "--precision", "bf15"], "precision must be one of"),
    "a sequence of a configuration": (["deepseek_v3:published", "--seq", "8"], "--seq is for a model"),
    "an override of a model": (["llama3_8b", "--set", "strategy.tp=2"], "--set changes a configuration"),
    "sources as CSV": (["llama3_8b", "--source", "--csv"], "--csv is for amounts, but --source tells places"),
    "two forms at once": (["llama3_8b", "--csv", "--json"], "--json: not allowed with argument --csv"),
    "a sequence of a trillion": (["llama3_8b", "--seq", "1000000000000"], "a whole number from 1 to 1000000000"),
    "null": (["null.json"], "null.json: must hold the fields of a model, but got null; give a model file"),
    "nothing": (
        ["empty.json"],
        "empty.json: must hold the fields of a model, but got nothing: the file is empty; give",
    ),
    "a folder without a config": (["folder"], "folder: a folder of a model holds a config.json, but this has none"),
    "a config without its type": (["typeless.json"], "typeless.json: model_type is absent, which names the architec"),
    "an unknown option": (["llama3_8b", "--sourc"], "unrecognized arguments: --sourc; see `search graph show --help`"),
    "depth of parts": (["llama3_8b", "--by", "part", "--depth", "2"], "--depth is for scopes"),
    "a negative depth": (["llama3_8b", "--depth", "-1"], "--depth"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bad_input_is_one_line_and_2(search, tmp_path, name):
    (tmp_path / "cut.json").write_text('{"format": "trainspace-graph", "version": ')
    (tmp_path / "plain.json").write_text("{}")
    (tmp_path / "null.json").write_text("null")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "typeless.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 8}')
    words, law = HOSTILE[name]
    said = search("graph", "show", *words)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert law in said.err


def changed(content, *way):
    *way, last, value = way
    for key in way:
        content = content[key]
    content[last] = value


def turned(content):
    ops = content["blocks"][1]["ops"]
    ops[0]["inputs"] = [ops[3]["outputs"][0]]


FILES = {
    "truncated": (lambda text: text[:1000], "must be JSON text"),
    "empty": (lambda text: "", "must hold the fields of a model"),
    "another version": (lambda c: changed(c, "version", 1), "version must be 2, but got 1; capture the model again"),
    "no version": (lambda c: c.pop("version") and None, "version must be 2, but is absent; capture the model again"),
    "another format": (
        lambda c: changed(c, "format", "x"),
        "(trainspace-ops), but got 'x'; capture or export it again",
    ),
    "a cycle": (turned, "the ops form a cycle"),
    "layers 0": (lambda c: changed(c, "model", "num_layers", 0), "num_layers must be at least 1"),
    "a negative size": (lambda c: changed(c, "blocks", 1, "ops", 1, "dims", 0, 0, -1), "must be a number from 0 to"),
    "a negative tensor": (lambda c: changed(c, "blocks", 1, "tensors", "x", 1, 0, 0, -1), "must be a number from 0"),
    "a negative width": (lambda c: changed(c, "model", "hidden", -8), "hidden must be at least 1"),
    "no graph": (lambda text: '{"a": 1}', "a is not a key of a model"),
    "no object": (lambda text: "[1]", "must hold the fields of a model"),
    "a config without model type": (
        lambda text: '{"hidden_size": 8}',
        "model_type is absent, which names the architecture; give one of",
    ),
    "a config of no layers": (
        lambda text: (
            '{"model_type": "llama", "num_hidden_layers": 0, "hidden_size": 8, "vocab_size": 9, '
            '"intermediate_size": 8, "num_attention_heads": 2}'
        ),
        "num_hidden_layers",
    ),
}


@pytest.mark.parametrize("command", ["show", "export", "diff", "estimate"])
@pytest.mark.parametrize("name", FILES)
def test_a_bad_graph_file_is_one_line_and_2_for_every_command(search, graph, tmp_path, name, command):
    change, law = FILES[name]
    text = (tmp_path / graph).read_text()
    content = json.loads(text)
    made = change(text) if change.__code__.co_varnames[0] == "text" else change(content)
    (tmp_path / "bad.json").write_text(made if isinstance(made, str) else json.dumps(content))
    (tmp_path / "bad.yaml").write_text("model: bad.json\nsystem: dgx_h100\nworkload: {seq: 8, global_batch: 8}\n")
    words = {"show": ["graph", "show", "bad.json"], "export": ["graph", "export", "bad.json", "--to", "csv"],
             "diff": ["graph", "diff", graph, "bad.json"], "estimate": ["estimate", "bad.yaml"]}  # fmt: skip
    said = search(*words[command])
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "bad.json" in said.err
    assert law in said.err


def test_a_point_is_of_a_configuration_not_of_a_model(search):
    said = search("graph", "show", "llama3_8b", "--reference", "mine")
    assert (said.code, len(said.err.splitlines())) == (2, 1)
    assert "--reference names a point of a configuration, but llama3_8b is a model" in said.err
