"""Units and formats: exact factors, and what people read."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware.dtype import DType
from hardware.units import GB, GBIT, GIB, US, format_bytes, format_count, format_seconds, parse_quantity


def test_a_400_gbit_port_moves_50_gigabytes_a_second():
    assert 400 * GBIT == 50 * GB


@pytest.mark.parametrize(
    ("text", "si"),
    [
        ("80 GB", 80e9),
        ("80 GiB", 80 * GIB),
        ("400 Gb/s", 50e9),
        ("5 us", 5 * US),
        ("1e12", 1e12),
        ("989.4 TFLOPS", 989.4e12),
    ],
)
def test_it_reads_quantities_into_si(text, si):
    assert parse_quantity(text) == si


@pytest.mark.parametrize("text", ["80 GIBS", "GB", "", "eighty GB"])
def test_it_refuses_quantities_it_cannot_read(text):
    with pytest.raises(ValueError, match="a quantity is a number and a unit"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (72.4 * GIB, "72.4 GiB"),
        (1023.99 * GIB, "1.0 TiB"),
        (-2 * GIB, "-2.0 GiB"),
    ],
)
def test_it_formats_bytes(x, text):
    assert format_bytes(x) == text


@pytest.mark.parametrize(
    ("x", "text"),
    [(19.94, "19.9 s"), (0.0032, "3.2 ms"), (4.5e-6, "4.5 us"), (2e-9, "2.0 ns"), (0, "0.0 s"), (0.99999, "1.0 s"),
     (3 * 3600, "3.0 h"), (3 * 86400, "3.0 days"), (math.inf, "inf s"), (1e-12, "0.0 ns")],
)  # fmt: skip
def test_it_formats_seconds(x, text):
    assert format_seconds(x) == text


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (42, "42"),
        (999, "999"),
        (1500, "1.5 K"),
        (671e9, "671.0 B"),
        (1.2e13, "1.2e13"),
        (999.96e9, "1.0e12"),
        (2.5e6, "2.5 M"),
    ],
)
def test_it_formats_counts(x, text):
    assert format_count(x) == text


@given(st.floats(min_value=1024, max_value=1e17))
def test_formatted_bytes_read_back_to_the_digits_shown(x):
    # One decimal of a figure that is at least 1.0: at most 5 % off.
    assert parse_quantity(format_bytes(x)) == pytest.approx(x, rel=0.05)


def test_every_format_has_a_size_and_block_scales_count():
    sizes = {d: d.nbytes for d in DType}
    assert sizes[DType.FP32] == sizes[DType.TF32] == 4
    assert sizes[DType.BF16] == sizes[DType.FP16] == 2
    assert sizes[DType.FP8] == sizes[DType.INT8] == 1
    assert sizes[DType.MXFP8] == (32 + 1) / 32
    assert sizes[DType.NVFP4] == (16 * 0.5 + 1) / 16
