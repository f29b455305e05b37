"""Layout strings of Megatron Core."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search.layout import chunk_layers, expand, filled_layers, layers_of, layout_string


def test_the_published_deepseek_layout_has_sixteen_chunks_of_four_but_the_last() -> None:
    layers = chunk_layers("Et*4|(t*4|)*14tmL", num_chunks=16, num_layers=61, num_mtp_layers=1)
    assert layers == (4,) * 15 + (1,)


@pytest.mark.parametrize(
    ("layout", "expanded"),
    [
        ("EtL", "EtL"),
        ("E t*3 , | t , L", "Ettt|tL"),
        ("E(t|)*3L", "Et|t|t|L"),
        ("E((t*2|)*2t|)*2L", "Ett|tt|t|tt|tt|t|L"),
        ("Et*0L", "EL"),
        ("E|*2tL", "E||tL"),
    ],
)
def test_multiplications_and_groups_expand(layout: str, expanded: str) -> None:
    assert expand(layout) == expanded


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("E(t|tL", "lacks a"),
        ("Et)|tL", "too many"),
        ("Et*|tL", "followed by a number"),
        ("Et*", "followed by a number"),
        ("E4t|tL", "follow '\\*'"),
        ("E*2*2", "follow '\\*'"),
        ("Ex|tL", "'x'"),
        ("Et*999999999|L", "at most"),
        ("E((t*9999)*9999)*9999L", "at most"),
        ("Et*" + "9" * 5000, "at most"),
    ],
)
def test_a_malformed_layout_names_the_rule(layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand(layout)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et|t|tL", r"pp \* vpp \(2\)"),
        ("Et|tL", "layers 4 times"),
        ("tt|ttL", "embedding 1 times"),
        ("Ett|tt", "loss 1 times"),
        ("Ett|ttmL", "mtp_layers 0 times"),
        ("tEt|ttL", "start with E"),
        ("EttL|tt", "start with E"),
    ],
)
def test_a_layout_of_another_model_is_refused(layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunk_layers(layout, num_chunks=2, num_layers=4)


@pytest.mark.parametrize("layout", ["Ettm|t|tL", "Ett|tm|tL", "Ett|t|mtL", "Ett|t|tLm"])
def test_mtp_layers_sit_between_the_last_layer_and_the_loss(layout: str) -> None:
    with pytest.raises(ValueError, match="start with E"):
        chunk_layers(layout, num_chunks=3, num_layers=4, num_mtp_layers=1)


@pytest.mark.parametrize(
    ("num_layers", "num_chunks", "expected"),
    [(61, 16, (*(4,) * 15, 1)), (8, 4, (2, 2, 2, 2)), (5, 1, (5,)), (61, 32, None), (62, 32, None), (9, 3, (3, 3, 3))],
)
def test_chunks_are_filled_from_the_front(num_layers: int, num_chunks: int, expected: tuple[int, ...] | None) -> None:
    assert filled_layers(num_layers=num_layers, num_chunks=num_chunks) == expected


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(0, 2))
def test_a_written_layout_reads_back(layers: list[int], num_mtp_layers: int) -> None:
    assert layers_of(layout_string(layers, num_mtp_layers)) == (tuple(layers), num_mtp_layers)


@given(st.integers(1, 12), st.integers(1, 20), st.integers(0, 3))
def test_chunks_that_repeat_are_written_once(layers: int, repeats: int, last: int) -> None:
    assert len(layout_string([layers, *[layers, 1, 2] * repeats, last])) < 40


@pytest.mark.parametrize(
    ("layers", "num_mtp_layers", "text"),
    [
        ((4,) * 15 + (1,), 1, "Et*4|(t*4|)*14tmL"),
        ((61,), 1, "Et*61mL"),
        ((0, 0, 0, 0, 2), 0, "E||||t*2L"),
        ((3, 3, 2), 0, "Et*3|t*3|t*2L"),
        ((1, *(2, 1) * 5, 0), 0, "Et|(t*2|t|)*5L"),
    ],
)
def test_layouts_are_written_as_people_write_them(layers: tuple[int, ...], num_mtp_layers: int, text: str) -> None:
    assert layout_string(layers, num_mtp_layers) == text
