"""Expressions, constraints and objectives: what they mean, what they refuse, and when bounds may be used."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from estimator.result import COLUMNS
from estimator.strategy import Overlap, Recompute, Schedule, Strategy
from search.objective import Constraint, Expression, Objective, exactness, strategy_values
from search.postfix import run
from search.yaml_lines import SpaceError

NAMES = ("tp", "cp", "pp", "step_time_s", "peak_memory_bytes")
EDGES = [0.0, -0.0, 1.0, -1.0, 2.0, 3.0, 0.1, -7.5, 1e300, -1e300, 5e-324, math.inf, -math.inf, math.nan]
VALUES = st.one_of(st.sampled_from(EDGES), st.floats(width=64))
ROWS = st.lists(st.tuples(*[VALUES] * len(NAMES)), min_size=1, max_size=8)


def texts(leaves: st.SearchStrategy[str], binary: list[str], others: list[str]) -> st.SearchStrategy[str]:
    """Random expressions: `others` are templates with one `{}`."""

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        pairs = st.tuples(inner, st.sampled_from(binary), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
        calls = st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})")
        singles = st.tuples(st.sampled_from(others), inner).map(lambda t: t[0].format(t[1]))
        return st.one_of(pairs, calls, singles)

    return st.recursive(leaves, grow, max_leaves=12)


ARITHMETIC = ["+", "-", "*", "/", "//", "%"]
LOGIC = ["<", "<=", ">", ">=", "==", "!=", "and", "or"]
ANY_TEXT = texts(
    st.sampled_from([*NAMES, "0", "1", "2.5", "1e300", "3"]),
    ARITHMETIC + LOGIC,
    ["(-{})", "(+{})", "abs({})", "(not {})", "({} ** 3)", "({} ** 0)", "(1 < {} <= 9)", "({} in [1, 2])"],
)
WHOLE_TEXT = texts(
    st.sampled_from(["tp", "cp", "pp", "0", "2", "3"]), ["+", "-", "*", "//", "%", *LOGIC[:6]], ["(-{})"]
)


def same_bits(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@given(ANY_TEXT, ROWS)
def test_the_jitted_run_gives_the_bits_of_the_columns(text, rows):
    expression = Expression.parse(text)
    opcodes, operands = expression.program(NAMES)
    columns = {name: np.array([row[i] for row in rows]) for i, name in enumerate(NAMES)}
    together = np.broadcast_to(expression.evaluate(columns), len(rows))
    stack = np.empty(expression.stack_size)
    for row, expected in zip(rows, together, strict=True):
        got = run(opcodes, operands, np.array(row), stack)
        if expression.is_logical:
            assert (got == 1.0) == bool(expected), (text, row)
            assert got in (0.0, 1.0) or math.isnan(got)
        else:
            assert same_bits(got, float(expected)), (text, row)


@pytest.mark.parametrize("text", [f"tp {op} cp" for op in ARITHMETIC + LOGIC] + ["min(tp, cp)", "max(tp, cp)"])
def test_every_operation_gives_the_same_bits_on_every_pair_of_edges(text):
    expression = Expression.parse(f"({text}) + 0" if any(f" {op} " in text for op in LOGIC) else text)
    opcodes, operands = expression.program(("tp", "cp"))
    tp, cp = (grid.ravel() for grid in np.meshgrid(EDGES, EDGES))
    expected = expression.evaluate({"tp": tp, "cp": cp})
    got = [run(opcodes, operands, np.array(pair), np.empty(3)) for pair in zip(tp, cp, strict=True)]
    assert [same_bits(a, b) for a, b in zip(got, expected.tolist(), strict=True)] == [True] * len(got)


@given(WHOLE_TEXT, st.tuples(*[st.integers(-20, 20)] * 3))
def test_whole_numbers_give_what_python_gives(text, values):
    names = dict(zip(("tp", "cp", "pp"), values, strict=True))
    try:
        expected = eval(text, {"__builtins__": {}, "min": min, "max": max}, names)
    except ZeroDivisionError:
        assume(False)
    assume(abs(expected) < 2**50)
    assert float(Expression.parse(text).evaluate(names)) == float(expected)


@pytest.mark.parametrize("text", ["tp / cp > 1", "tp / cp < 1", "not tp / cp > 1", "tp % cp >= 0", "tp // cp != 3"])
def test_a_division_by_zero_satisfies_nothing(text):
    expression = Expression.parse(text)
    assert not expression.evaluate({"tp": 4, "cp": 0})
    opcodes, operands = expression.program(("tp", "cp"))
    assert run(opcodes, operands, np.array([4.0, 0.0]), np.empty(expression.stack_size)) != 1.0


def test_what_is_decided_without_the_undefined_part_is_decided():
    assert Expression.parse("tp == 4 or tp / cp > 1").evaluate({"tp": 4, "cp": 0})
    assert Expression.parse("not (tp == 3 and tp / cp > 1)").evaluate({"tp": 4, "cp": 0})


def test_a_chain_is_the_conjunction_of_its_pairs():
    answers = Expression.parse("1 < tp <= 4").evaluate({"tp": np.array([1, 2, 4, 5])})
    assert answers.tolist() == [False, True, True, False]


def test_variables_come_in_order_of_use_and_once():
    assert Expression.parse("pp * tp + pp <= cp").variables == ("pp", "tp", "cp")


def test_program_names_the_variable_that_is_missing():
    with pytest.raises(ValueError, match="must hold 'cp'"):
        Expression.parse("tp * cp").program(("tp",))


def test_the_stack_size_is_enough_and_not_more():
    assert Expression.parse("tp").stack_size == 1
    assert Expression.parse("tp + cp + pp").stack_size == 2
    assert Expression.parse("tp + (cp + (pp + 1))").stack_size == 4


def test_texts_compare_by_equality():
    strategy = Strategy(tp=2, schedule=Schedule.DUALPIPE, recompute=Recompute.parse("mla_up_proj+layernorm"))
    values = strategy_values(strategy)
    assert Expression.parse("schedule == 'dualpipe' and tp == 2").evaluate(values)
    assert Expression.parse("schedule not in ['1f1b', 'gpipe']").evaluate(values)
    assert Expression.parse("recompute == 'layernorm+mla_up_proj'").evaluate(values)
    assert not Expression.parse("'bf16' != precision").evaluate(values)


def test_texts_of_a_column_may_be_given_as_text():
    answers = Expression.parse("schedule == 'gpipe'").evaluate({"schedule": np.array(["1f1b", "gpipe"])})
    assert answers.tolist() == [False, True]


def test_flags_are_numbers():
    values = strategy_values(Strategy(sequence_parallel=True, overlap=Overlap(ep=1)))
    assert Expression.parse("sequence_parallel and overlap_ep == 1 and not overlap_dp").evaluate(values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpp <= 8", "did you mean 'tp'"),
        ("step_time <= 8", "did you mean 'step_time_s'"),
        ("schedule == 'dualpip'", "did you mean 'dualpipe'"),
        ("recompute == 'ful'", "must name one of"),
        ("precision == 'bf61'", "did you mean 'bf16'"),
        ("schedule < 'gpipe'", "a text has no order"),
        ("schedule", "a text must be compared"),
        ("schedule == 3", "must be compared with a text"),
        ("tp == 'a'", "a text must be compared with a name"),
        ("__import__('os').system('true')", "known function"),
        ("abs.__class__", "arithmetic and logic"),
        ("tp[0] < 1", "'tp\\[0\\]' at column 1"),
        ("[x for x in (1,)]", "arithmetic and logic"),
        ("(lambda: 1)()", "known function"),
        ("tp if cp else pp", "arithmetic and logic"),
        ("min(tp, key=cp)", "known function"),
        ("min(*tp)", "arithmetic and logic"),
        ("max()", "must be given values"),
        ("abs(tp, cp)", "one value"),
        ("tp is 3", "one of < <="),
        ("tp ** cp", "'cp' at column 7"),
        ("tp ** 65", "0 to 64"),
        ("tp ** 0.5", "whole number"),
        ("~tp", "accepted not"),
        ("tp & 1", "arithmetic and logic"),
        ("1e999 < tp", "finite"),
        ("2j < tp", "a constant must be a number"),
        ("tp in cp", "must be a list"),
        ("tp <", "well formed"),
        ("tp = 2", "well formed"),
        ("40and tp", "well formed"),
        ("tp\0", "well formed"),
        ("(" * 300, "well formed"),
        ("-" * 500 + "tp", "nest at most"),
        ("1+" * 501 + "1", "at most 1000 characters"),
        (" ", "must be text"),
    ],
)
def test_what_is_not_an_expression_is_named(text, message):
    with pytest.raises(SpaceError, match=message) as caught:
        Expression.parse(text)
    assert "\n" not in str(caught.value)


def test_a_constraint_must_answer():
    with pytest.raises(SpaceError, match="must compare"):
        Constraint.parse("tp * 8")


def test_only_results_need_pricing():
    assert not Constraint.parse("tp * cp <= num_gpus").needs_result
    assert Constraint.parse("tp <= 8 and step_time_s <= 40").needs_result


@pytest.mark.parametrize(
    ("text", "bounded"),
    [
        ("step_time_s <= 40", True),
        ("40 >= step_time_s", True),
        ("step_time_s >= 40", False),
        ("10 <= step_time_s <= 40", False),
        ("tokens_per_s >= 1e6", True),
        ("tokens_per_s <= 1e6", False),
        ("-step_time_s >= -40", True),
        ("40 - step_time_s > 0", True),
        ("step_time_s * 2 + 1 <= 40", True),
        ("step_time_s * -2 <= -80", False),
        ("step_time_s / 2 <= 40", True),
        ("40 / step_time_s >= 1", False),  # true of it, but not proven: enumerate
        ("not step_time_s > 40", True),
        ("step_time_s == 40", False),
        ("abs(step_time_s) <= 40", False),
        ("max(step_time_s, cost_usd_per_mtoken) <= 40", True),
        ("step_time_s <= 40 or peak_memory_bytes <= 6e10", True),
        ("step_time_s - peak_memory_bytes <= 0", False),
        ("bubble_s <= 1", False),
        ("tp >= 2 and step_time_s <= 40", True),
        ("tp >= 2 or step_time_s <= 40", False),
        ("step_time_s * tp <= 40", False),
        ("schedule == 'gpipe'", True),
        ("num_gpus == 512", True),
    ],
)
def test_bounds_serve_constraints_that_hold_for_whatever_is_better(text, bounded):
    assert Constraint.parse(text).is_bounded is bounded


@pytest.mark.parametrize("name", [c.name for c in COLUMNS])
def test_bounds_serve_exactly_the_objectives_that_follow_something(name):
    known = next(c for c in COLUMNS if c.name == name)
    good = Objective(column=name, minimise=known.better == "lower")
    against = Objective(column=name, minimise=known.better != "lower")
    assert exactness([good], [])[0] is bool(known.follows)
    assert exactness([against], [])[0] is False


def test_exactness_names_the_culprit():
    step = Objective(column="step_time_s", minimise=True)
    assert "mfu" in exactness([step, Objective(column="mfu", minimise=False)], [])[1]
    assert "step_time_s >= 4" in exactness([step], [Constraint.parse("step_time_s >= 4")])[1]
