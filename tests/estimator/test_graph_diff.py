"""Differences of graphs: whatever is done to one is what is told, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.build import build
from estimator.graph import BlockKind
from estimator.graph_diff import diff
from estimator.op import Dim, Tensor
from estimator.passes.differentiate import differentiate
from tests.estimator.cases import LLAMA

KIND = BlockKind.DENSE


@pytest.fixture(scope="module")
def graph():
    return build(LLAMA, 128)


def with_ops(graph, change, tensors=None):
    block = graph.blocks[KIND].with_ops(tuple(change(list(graph.blocks[KIND].ops))), tensors)
    return replace(graph, blocks={**graph.blocks, KIND: block})


def test_a_graph_equals_itself(graph):
    assert diff(graph, build(LLAMA, 128)).is_equal
    assert diff(differentiate(graph), differentiate(graph)).is_equal


@pytest.mark.parametrize("at", range(18))
def test_an_op_that_is_gone_is_removed_one_way_and_added_the_other(graph, at):
    lost = graph.blocks[KIND].ops[at]
    less = with_ops(graph, lambda ops: ops[:at] + ops[at + 1 :])
    there, back = diff(graph, less), diff(less, graph)
    assert [(phase, kind) for _, phase, kind in there.removed] == [("forward", lost.kind.value)]
    assert there.removed == back.added
    assert not there.added
    assert not there.changed
    assert not there.renamed


def test_an_op_with_another_size_is_changed_in_that_field(graph):
    (at,) = [i for i, op in enumerate(graph.blocks[KIND].ops) if op.name == "mlp.up_proj"]

    def wider(ops):
        m, k, n = ops[at].dims
        ops[at] = ops[at].but(dims=(m, k, n._replace(size=n.size + 1)))
        return ops

    (change,) = diff(graph, with_ops(graph, wider)).changed
    assert (change.scope, change.phase, list(change.fields)) == ("layers/dense/mlp/up_proj", "forward", ["dims"])
    before, after = change.fields["dims"]
    assert (before[2][0], after[2][0]) == (LLAMA.ffn, LLAMA.ffn + 1)


def test_another_shape_of_a_tensor_is_told_by_who_has_it(graph):
    old = graph.blocks[KIND].tensors["mlp.act.out"]
    new = Tensor((*old.dims[:-1], Dim(7.0, old.dims[-1].axis)), old.role)
    found = diff(graph, with_ops(graph, list, {"mlp.act.out": new}))
    assert {change.scope for change in found.changed} == {"layers/dense/mlp/act", "layers/dense/mlp/down_proj"}
    assert all(list(change.fields) == ["tensor mlp.act.out"] for change in found.changed)


def test_an_op_with_another_name_is_renamed(graph):
    def called_otherwise(ops):
        return [op.but(name="ffn.up") if op.name == "mlp.up_proj" else op for op in ops]

    found = diff(graph, with_ops(graph, called_otherwise))
    assert found.renamed == (("layers/dense/mlp/up_proj", "layers/dense/ffn/up"),)
    assert not found.added
    assert not found.removed


def test_another_order_is_told(graph):
    found = diff(graph, with_ops(graph, lambda ops: [ops[1], ops[0], *ops[2:]]))
    assert found.reordered == ("dense",)
    assert not found.changed


def test_another_depth_is_told(graph):
    found = diff(graph, build(replace(LLAMA, num_layers=9), 128))
    assert found.times == {"dense": (8, 9)}
    assert not found.is_equal
    assert not found.changed
