"""`diff` finds nothing between a model file and its capture where the families are equal, and a torn-out op at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.graph_diff import diff
from tests.capture.captured import EQUAL, SEQ, built, canonical


@pytest.mark.parametrize("family", EQUAL)
def test_what_was_captured_is_what_is_built(folder, family):
    captured = canonical(folder, family).captured_at(SEQ)
    assert diff(built(family), captured).is_equal
    kind = next(kind for kind in captured.kinds if kind.is_layer)
    block = captured.blocks[kind]
    torn = replace(captured, blocks={**captured.blocks, kind: block.with_ops(block.ops[1:])})
    found = diff(built(family), torn)
    assert [scope for scope, _, _ in found.removed] == [f"layers/{kind.value}/{block.ops[0].name.replace('.', '/')}"]
