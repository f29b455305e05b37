"""Cost backends of installed packages: found by entry point, asked once about each content, named in what is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from estimator.cost.asked import Asked, content_hash
from estimator.cost.price import BACKENDS, Confidence, price
from estimator.cost.work import work
from estimator.graph import BlockKind
from estimator.op import OpKind, Phase
from estimator.precision import recipe
from estimator.strategy import Strategy
from tests.estimator.cases import LLAMA, block, h100, named

BF16, CHIP = recipe("bf16"), h100(8).chip
MODULE = """\
class Table:
    name, priority, confidence = "lab_table", 200, "high"

    def covers(self, op, chip):
        return op.kind.value == "norm" and chip.name.startswith("h100")

    def seconds(self, op, amount, chip, recipe):
        assert isinstance(amount.nbytes, float)
        return 0.5


class Bad(Table):
    priority = "high"
"""


class Counting:
    """Answers twice what memory takes, and counts how often it is asked."""

    name, priority = "counting", 150

    asked = 0

    def covers(self, op, chip):
        return op.kind is OpKind.MATMUL

    def seconds(self, op, amount, chip, recipe):
        self.asked += 1
        assert all(isinstance(d.size, float) for d in op.dims)
        return 2.0 * amount.nbytes / chip.hbm_bytes_per_s


def test_a_backend_of_a_user_answers_first_and_is_asked_once_about_each_content():
    mine = Counting()
    chain = (Asked(mine, mine.name, mine.priority), *BACKENDS)
    b = block(LLAMA, BlockKind.DENSE)
    k, v = named(b, "attention.k_proj"), named(b, "attention.v_proj")
    prices = [price(op, b, CHIP, BF16, chain) for op in (k, v, k)]
    assert mine.asked == 1
    assert {p.source for p in prices} == {"counting"}
    assert {p.confidence for p in prices} == {Confidence.MEDIUM}
    assert prices[0].seconds == 2.0 * work(k, b, BF16).nbytes / CHIP.hbm_bytes_per_s
    assert price(named(b, "input_norm"), b, CHIP, BF16, chain).source == "roofline"


def test_rows_of_a_batch_are_asked_one_by_one_and_each_distinct_one_once():
    tp = np.array([1.0, 2.0, 4.0, 2.0, 1.0])
    mine = Counting()
    chain = (Asked(mine, mine.name, mine.priority), *BACKENDS)
    rows = block(LLAMA, BlockKind.DENSE, Strategy(tp=tp))
    many = price(named(rows, "mlp.up_proj"), rows, CHIP, BF16, chain).seconds
    assert mine.asked == 3
    for i, degree in enumerate(tp):
        one = block(LLAMA, BlockKind.DENSE, Strategy(tp=float(degree)))
        assert many[i] == price(named(one, "mlp.up_proj"), one, CHIP, BF16, chain).seconds


def test_the_hash_is_of_all_that_an_answer_may_depend_on():
    b = block(LLAMA, BlockKind.DENSE)
    op = named(b, "mlp.up_proj")
    amount = work(op, b, BF16)
    same = content_hash(op.but(name="other", inputs=("a",)), amount, CHIP, BF16)
    assert same == content_hash(op, amount, CHIP, BF16)
    wider = op.but(dims=(*op.dims[:2], op.dims[2]._replace(size=1.0)))
    back = op.but(phase=Phase.BACKWARD)
    others = [(wider, amount, CHIP, BF16), (back, amount, CHIP, BF16), (op, amount, CHIP, recipe("fp8")),
              (op, amount._replace(nbytes=1.0), CHIP, BF16), (op, amount, replace(CHIP, num_sms=7), BF16)]  # fmt: skip
    assert len({same, *(content_hash(*other) for other in others)}) == 1 + len(others)


@pytest.mark.parametrize("answer", [float("nan"), -1.0, float("inf"), "fast"])
def test_an_answer_that_is_no_time_is_refused_by_name(answer):
    mine = Counting()
    mine.seconds = lambda *_: answer
    b = block(LLAMA, BlockKind.DENSE)
    with pytest.raises(ValueError, match="cost backend 'counting' must answer in seconds .* of mlp.up_proj on h100"):
        price(named(b, "mlp.up_proj"), b, CHIP, BF16, (Asked(mine, "counting", 150), *BACKENDS))


def test_every_answer_of_ours_is_tagged_with_what_it_rests_on():
    b = block(LLAMA, BlockKind.DENSE)
    tags = {op.kind: price(op, b, CHIP, BF16).confidence for op in b.ops if op.kind is not OpKind.COLLECTIVE}
    assert tags[OpKind.MATMUL] is Confidence.HIGH  # its rate is fitted to measured products
    assert tags[OpKind.ATTENTION] is Confidence.HIGH
    assert tags[OpKind.NORM] is Confidence.LOW
    assumed = replace(CHIP, measured=frozenset())
    assert price(named(b, "mlp.up_proj"), b, assumed, BF16).confidence is Confidence.MEDIUM


@pytest.fixture
def installed(tmp_path):
    """A package with an entry point, as pip would leave it; runs a command of ours beside it."""
    (tmp_path / "lab_costs.py").write_text(MODULE, encoding="utf-8")
    info = tmp_path / "lab_costs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-costs\nVersion: 1.0\n", encoding="utf-8")

    def run(root, target, *words):
        (info / "entry_points.txt").write_text(f"[trainspace.cost_backends]\nlab = {target}\n", encoding="utf-8")
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(tmp_path)])}
        return subprocess.run([sys.executable, "-m", "search", *words], cwd=root, env=env, text=True,
                              capture_output=True, timeout=300)  # fmt: skip

    return run


def test_an_installed_backend_prices_and_is_named(installed, root):
    words = ("estimate", "llama3_70b:rule_of_thumb", "--json", "--ops")
    done = installed(root, "lab_costs:Table", *words)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    norms = [op for op in data["ops"] if op["kind"] == "norm"]
    assert norms
    assert {(op["source"], op["seconds"], op["confidence"]) for op in norms} == {("lab_table", 0.5, "high")}
    shares = data["price_sources"]
    assert shares["lab_table"] > 0.9  # half a second a norm
    assert sum(shares.values()) == pytest.approx(1.0, rel=1e-12)
    assert data["step_time_s"] > 100
    text = installed(root, "lab_costs:Table", *words[:2]).stdout
    assert "lab_table" in text.partition("price sources:")[2].partition("\n")[0]


@pytest.mark.parametrize(("target", "law"), [
    ("lab_costs:Bad", "must have a whole number as its priority, but has 'high'"),
    ("lab_costs:Nothing", "cannot be loaded"),
    ("no_such_module:X", "cannot be loaded"),
    ("json:dumps", "must have name, priority, covers, seconds, but lacks name"),
])  # fmt: skip
def test_a_backend_that_cannot_be_used_ends_the_command_in_one_line(installed, root, target, law):
    done = installed(root, target, "catalog", "chips")
    assert done.returncode == 2
    assert law in done.stderr
    assert done.stderr.count("\n") == 1
    assert "lab = " in done.stderr
