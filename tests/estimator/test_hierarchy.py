"""The tree of scopes: what it sums is what the graph has, at every depth, and each part is told apart."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import spaces
from estimator.build import build
from estimator.cost.work import work, written_bytes
from estimator.graph import BlockKind
from estimator.hierarchy import METRICS, GraphHierarchy
from estimator.inventory import inventory
from estimator.model import ModelSpec
from estimator.model_io import load_model, model_names
from estimator.op import OpKind, Phase
from estimator.part import Part, part_of
from estimator.passes import lower, recompute
from estimator.precision import recipe
from estimator.strategy import Fusion, Recompute, Strategy
from hardware.catalog import chip
from tests.estimator.cases import LLAMA
from tests.estimator.hf_families import FAMILIES

MODELS = ("llama3_8b", "mixtral_8x7b", "deepseek_v3", "qwen3_next", "nemotron_h_56b", "gpt_oss_120b")


def tree_of(name="deepseek_v3", seq=4096, precision="bf16", **options):
    config = FAMILIES[name][0] if name in FAMILIES and name not in model_names([spaces.MODELS]) else None
    model = load_model(name, [spaces.MODELS]) if config is None else ModelSpec.from_hf_config(config)
    graph = build(model, seq)
    return graph, GraphHierarchy(name, inventory(graph, recipe(precision), **options))


def lowered(**changes):
    strategy = Strategy(tp=2, ep=8, sequence_parallel=True, fusion=tuple(Fusion), **changes)
    graph = lower(build(load_model("deepseek_v3", [spaces.MODELS]), 4096), strategy, recipe(strategy.precision))
    return recompute(graph, Recompute.parse("selective"))


@pytest.mark.parametrize("metric", METRICS)
def test_every_depth_sums_up_to_the_model(metric):
    _, tree = tree_of()
    whole = tree.aggregate(tree.root, metric)
    deepest = max(node.depth for node in tree.root.walk())
    assert deepest >= 4
    if metric == "seconds":
        assert math.isnan(whole)
        return
    for depth in range(deepest + 2):
        assert math.fsum(tree.aggregate(node, metric) for node in tree.at_depth(depth)) == pytest.approx(whole, 1e-12)
    assert math.fsum(tree.by_part(metric).values()) == pytest.approx(whole, 1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_graph(name):
    graph, tree = tree_of(name)
    assert tree.aggregate(tree.root, "parameters") == graph.num_parameters()


def test_a_table_that_the_ends_share_is_counted_once():
    graph = build(replace(LLAMA, tied_embeddings=True), 128)
    tree = GraphHierarchy("tied", inventory(graph, recipe("bf16")))
    assert tree.aggregate(tree.root, "parameters") == graph.num_parameters()
    assert tree.aggregate(tree.find("head", "lm_head"), "parameters") == 0


def test_an_op_counts_as_often_as_the_model_runs_its_layer():
    graph, tree = tree_of()
    router = tree.find("layers", "moe", "router", "router")
    assert router.times == graph.sequence.count(BlockKind.MOE) == 59  # 58 and the one behind MTP
    assert tree.aggregate(router, "flops") == 59 * 2 * 4096 * 7168 * 256
    assert tree.aggregate(router, "ops") == 59
    assert tree.aggregate(router, lambda entry: entry.op.dims[-1].size) == 59 * 256


def test_scopes_of_several_kinds_of_layers_have_no_number_of_runs():
    _, tree = tree_of("gpt_oss_120b")  # two kinds that run equally often
    assert [node.times for node in tree.find("layers").children] == [18, 18]
    assert tree.find("layers").times == 0


def test_depths_are_model_ends_layers_and_their_halves():
    _, tree = tree_of()
    assert [node.path[-1] for node in tree.at_depth(1)] == ["embedding", "layers", "head", "mtp"]
    assert [node.path[1:] for node in tree.at_depth(2)][1:3] == [("layers", "dense"), ("layers", "moe")]
    assert [node.path[-1] for node in tree.find("layers", "moe").children] == [
        "input_norm", "attention", "post_attention_norm", "router", "dispatch", "experts", "combine", "shared", "mlp",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="deepseek_v3/layers has no scope 'dens'; have .*'dense', 'moe'"):
        tree.find("layers", "dens")


def test_parts_are_told_apart():
    parts = {
        entry.op.name: entry.part
        for name in ("deepseek_v3", "qwen3_next", "nemotron_h_56b")
        for entry in tree_of(name)[1].root.entries
    }
    assert parts["shared.up_proj"] is Part.SHARED_EXPERTS
    assert parts["experts.up"] is Part.EXPERTS
    assert parts["router.top"] is Part.ROUTER
    assert parts["attention.q_rope"] is Part.ROTARY
    assert parts["attention.q_a_norm"] is Part.NORM
    assert parts["attention.o_proj"] is Part.ATTENTION
    assert parts["mlp.residual"] is Part.RESIDUAL
    assert set(parts.values()) >= {Part.LINEAR_ATTENTION, Part.SCAN, Part.MTP, Part.EMBEDDING, Part.HEAD, Part.MLP}
    traffic = {part_of(op) for block in lowered().blocks.values() for op in block.ops if op.kind is OpKind.COLLECTIVE}
    assert traffic == {Part.COMMUNICATION}


@pytest.mark.parametrize("precision", ["bf16", "fp8_block", "nvfp4"])
def test_bytes_read_and_written_are_the_bytes_that_are_priced(precision):
    graph, r = lowered(precision=precision), recipe(precision)
    for entry in inventory(graph, r):
        if entry.op.kind is OpKind.COLLECTIVE:
            assert (entry.read_bytes, entry.written_bytes, entry.link_bytes) == (0, 0, entry.op.payload)
            continue
        assert entry.written_bytes >= 0
        assert entry.read_bytes >= 0
        if not r.sensitive:
            assert entry.read_bytes + entry.written_bytes == pytest.approx(work(entry.op, entry.block, r).nbytes, 1e-12)


def test_what_is_held_on_the_chip_is_neither_read_nor_written():
    r = recipe("bf16")
    streaming = [e for e in inventory(lowered(), r) if not e.op.dims and e.op.kind is not OpKind.COLLECTIVE]
    held = [entry for entry in streaming if entry.op.held.intersection(entry.op.outputs)]
    assert held
    for entry in streaming:
        op, tensors = entry.op, entry.block.tensors
        for names, moved in ((op.inputs, entry.read_bytes), (op.outputs, entry.written_bytes)):
            each = [tensors[n].elements * r.nbytes(tensors[n].role) for n in names if n not in op.held]
            assert moved == pytest.approx(op.passes * sum(each), rel=1e-12), op.name


def test_a_product_reads_two_matrices_and_writes_one():
    (entry,) = [e for e in inventory(build(LLAMA, 128), recipe("bf16")) if e.scope[-1] == "up_proj"]
    m, k, n = (dim.size for dim in entry.op.dims)
    assert (entry.read_bytes, entry.written_bytes) == (2 * (m * k + k * n), 2 * m * n)
    graded = lowered()
    gradient = next(e for e in inventory(graded, recipe("bf16")) if e.op.phase is Phase.WEIGHT_GRAD)
    k, m, n = (dim.size for dim in gradient.op.dims)
    assert written_bytes(gradient.op, gradient.block, recipe("bf16")) == 4 * k * n  # summed in fp32


def test_seconds_are_those_of_the_chain_of_backends():
    from estimator.cost.price import price

    graph, h100 = build(LLAMA, 128), chip("h100")
    for entry in inventory(graph, recipe("bf16"), h100):
        p = price(entry.op, entry.block, h100, recipe("bf16"))
        assert (entry.seconds, entry.source) == (p.seconds, p.source)
        assert entry.bound == ("compute" if p.compute_s >= p.memory_s else "memory")


def test_gradients_stand_with_their_op():
    tree = GraphHierarchy("rank", inventory(lowered(), recipe("bf16")))
    leaf = tree.find("layers", "dense", "attention", "o_proj", "o_proj")  # beside the scatter behind it
    assert [entry.op.phase for entry in leaf.own] == [Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT_GRAD]


def test_an_unknown_metric_is_refused():
    _, tree = tree_of()
    with pytest.raises(ValueError, match=r"metric must be one of .*, but got 'flop'"):
        tree.aggregate(tree.root, "flop")
