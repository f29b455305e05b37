"""Sums of products of named sizes, exact: what a cost formula comes to when its sizes are letters.

The functions that count FLOPs and bytes take one in place of a number, so that a formula is shown by the code that
computes it. Divides by single products only, compares nothing, rounds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Final

__all__ = ["Polynomial", "letter"]

Term = tuple[tuple[str, int], ...]
"""Letters with their powers, in order of the alphabet."""
ONE: Final[Term] = ()


class Polynomial:
    """Coefficients by term.

    >>> m, k, n = letter("m"), letter("k"), letter("n")
    >>> print(2.0 * (m * k + k * n), "and", m / k * k)
    2*k*m + 2*k*n and m
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Term, Fraction]) -> None:
        self.terms = {term: factor for term, factor in terms.items() if factor}

    def __add__(self, other: object) -> Polynomial:
        right = _as_polynomial(other)
        terms = dict(self.terms)
        for term, factor in right.terms.items():
            terms[term] = terms.get(term, Fraction(0)) + factor
        return Polynomial(terms)

    def __mul__(self, other: object) -> Polynomial:
        terms: dict[Term, Fraction] = {}
        for left, a in self.terms.items():
            for right, b in _as_polynomial(other).terms.items():
                term = _joined(left, right, 1)
                terms[term] = terms.get(term, Fraction(0)) + a * b
        return Polynomial(terms)

    def __truediv__(self, other: object) -> Polynomial:
        ((right, b),) = _as_polynomial(other).terms.items()
        return Polynomial({_joined(left, right, -1): a / b for left, a in self.terms.items()})

    def __rtruediv__(self, other: object) -> Polynomial:
        return _as_polynomial(other) / self

    def __neg__(self) -> Polynomial:
        return self * -1

    def __sub__(self, other: object) -> Polynomial:
        return self + -_as_polynomial(other)

    def __rsub__(self, other: object) -> Polynomial:
        return _as_polynomial(other) - self

    __radd__ = __add__
    __rmul__ = __mul__

    def at(self, sizes: Mapping[str, float]) -> float:
        """Its value where the letters are these numbers, rounded once."""
        total = Fraction(0)
        for term, factor in self.terms.items():
            for name, power in term:
                factor *= Fraction(sizes[name]) ** power
            total += factor
        return float(total)

    def written(self, sizes: Mapping[str, float] | None = None) -> str:
        """As spreadsheets and Python read it; with numbers in place of letters where `sizes` are given."""
        parts = [_written(term, factor, sizes) for term, factor in sorted(self.terms.items(), key=_order)]
        return " + ".join(parts).replace("+ -", "- ") or "0"

    def __str__(self) -> str:
        return self.written()


def letter(name: str) -> Polynomial:
    """A size by its name."""
    return Polynomial({((name, 1),): Fraction(1)})


def _as_polynomial(value: object) -> Polynomial:
    if isinstance(value, Polynomial):
        return value
    assert isinstance(value, int | float), f"{value!r} is no size"
    return Polynomial({ONE: Fraction(value)})


def _joined(left: Term, right: Term, sign: int) -> Term:
    powers = dict(left)
    for name, power in right:
        powers[name] = powers.get(name, 0) + sign * power
    return tuple(sorted((name, power) for name, power in powers.items() if power))


def _order(item: tuple[Term, Fraction]) -> tuple[int, Term]:
    return -sum(power for _, power in item[0]), item[0]


def _written(term: Term, factor: Fraction, sizes: Mapping[str, float] | None) -> str:
    shown = {name: name if sizes is None else _number(sizes[name]) for name, _ in term}
    words = [shown[name] for name, power in term for _ in range(power)]
    if factor == -1 and words:
        words[0] = "-" + words[0]
    elif factor != 1 or not words:
        words = [_number(float(factor)), *words]
    return "*".join(words) + "".join(f"/{shown[name]}" for name, power in term for _ in range(-power))


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)
