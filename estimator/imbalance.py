"""How unevenly a router loads ranks of experts: the fullest rank over the mean, with and without redundant experts.

Answers with quantiles over layers and steps, from seeded samples: the same number on every call. Knows no seconds and
no bytes (passes/balance.py has the sizes). Refuses a skew that no router can have.

Legend: E experts, ep ranks, R redundant experts, S samples; loads are over their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from estimator.model import ModelSpec
from estimator.workload import Workload

__all__ = ["BALANCED", "DRIFT", "MEDIAN", "NUM_SAMPLES", "Routing", "expert_loads", "load_factor", "placed_loads"]

MEDIAN = 0.5
NUM_SAMPLES = 1024  # quantiles from 0.1 to 0.9 within 3 % of the excess over 1 (a test holds them to 16 times as many)
SEED = 20240828
DRIFT = 0.9  # correlation of an expert's log load with that in the window that placed it; assumption
REACH = 60  # doublings of a spread: beyond 2^60 a sample has one expert left
HALVINGS = 50  # of its bracket: to the last bits of a double


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """A router as the estimate sees it. `skew`: coefficient of variation of the experts' loads within a layer.

    `quantile`: over layers and steps. Balanced routing has skew 0 at every quantile.
    """

    num_experts: int = 1
    top_k: int = 1
    skew: float = 0.0
    quantile: float = MEDIAN

    @classmethod
    def of(cls, model: ModelSpec, workload: Workload, quantile: float = MEDIAN) -> Routing:
        """Of a model under a workload; ValueError where tokens that visit an expert once cannot be so uneven.

        Experts with a capacity are padded to it (Fedus 2021, arXiv:2101.03961, section 2.2): what is above is dropped,
        so that skew costs tokens and no time.
        """
        moe, skew = model.moe, workload.routing_skew
        if moe is None:
            return BALANCED
        most = math.sqrt(moe.num_experts / moe.top_k - 1)
        if skew > most:
            raise ValueError(
                f"routing_skew ({skew:g}) must be at most sqrt(num_experts / top_k - 1) = {most:.4g}: "
                "a token visits an expert once, so that no load can be further from the mean"
            )
        if not skew or moe.capacity_factor is not None:
            return BALANCED
        return cls(num_experts=moe.num_experts, top_k=moe.top_k, skew=skew, quantile=quantile)

    def load_factor(self, ep: float | np.ndarray, redundant: int = 0) -> float | np.ndarray:
        """Load of the fullest of `ep` ranks over the mean: a number, or `[N]` for `[N]` degrees."""
        if not self.skew:
            return 1.0
        if isinstance(ep, np.ndarray):
            degrees, place = np.unique(ep, return_inverse=True)
            return np.array([self._factor(int(n), redundant) for n in degrees])[place.reshape(ep.shape)]
        return self._factor(int(ep), redundant)

    def _factor(self, ep: int, redundant: int) -> float:
        return load_factor(self.num_experts, ep, redundant, self.skew, self.quantile, top_k=self.top_k)


BALANCED = Routing()


@lru_cache(maxsize=4096)
def load_factor(
    num_experts: int, ep: int, redundant: int, skew: float, quantile: float = MEDIAN, *, top_k: int = 1
) -> float:
    """Load of the fullest of `ep` ranks over the mean, at a quantile over layers and steps.

    A rank with s experts gets at most min(1, s / top_k) of all rows, whatever is sampled.

    >>> round(load_factor(2, 2, 0, 0.25), 12)  # two experts: 1 + skew and 1 - skew
    1.25
    """
    if not skew or ep == 1:
        return 1.0
    most = ep * min(1.0, (num_experts + redundant) / ep / top_k)
    found = np.quantile(_factors(num_experts, ep, redundant, skew), quantile)
    return min(max(float(found), 1.0), most)


@lru_cache(maxsize=512)
def _factors(num_experts: int, ep: int, redundant: int, skew: float) -> np.ndarray:
    """The factor of each sample [S]."""
    before, now = _windows(num_experts, skew)
    if not redundant:  # experts stay where they are numbered: E / ep neighbours on a rank
        ranks = now.reshape(len(now), ep, num_experts // ep).sum(axis=2)
    else:
        ranks = placed_loads(before, now, ep, redundant)
    return np.asarray(ranks.max(axis=1) * ep / num_experts)


@lru_cache(maxsize=64)
def _windows(num_experts: int, skew: float) -> tuple[np.ndarray, np.ndarray]:
    """Loads of the window that experts are placed by, and of the present one: [S, E] each."""
    return expert_loads(num_experts, skew, NUM_SAMPLES)


def expert_loads(num_experts: int, skew: float, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-normal loads of experts in two windows, every row with a mean of 1 and a coefficient of variation of `skew`.

    A router's logits are about normal and its shares their softmax, hence log-normal. The spread of each sample is
    scaled until its own coefficient of variation is right, so that samples differ in which experts are hot and how far
    the hottest stand out, not in how uneven they are. Noise of counting tokens is part of `skew` as it is measured.
    """
    # RandomState's streams are frozen between versions of numpy (NEP 19); those of Generator are not.
    before, fresh = np.random.RandomState(SEED).standard_normal((2, num_samples, num_experts))
    now = DRIFT * before + math.sqrt(1.0 - DRIFT**2) * fresh
    return _tilted(before, skew), _tilted(now, skew)


def _tilted(z: np.ndarray, skew: float) -> np.ndarray:
    """exp(s z) over its mean, with the s of each row that gives it this coefficient of variation.

    E sum(w^2) / sum(w)^2 = 1 + skew^2 grows with s, for the mean of z under weights exp(s z) does.
    """
    z = z - z.max(axis=1, keepdims=True)

    def weights(s: np.ndarray) -> np.ndarray:
        return np.exp(s[:, None] * z)

    def is_short(s: np.ndarray) -> np.ndarray:
        w = weights(s)
        return np.asarray(z.shape[1] * (w * w).sum(axis=1) < (1.0 + skew * skew) * w.sum(axis=1) ** 2)

    w = weights(_root(is_short, len(z)))
    return np.asarray(w / w.mean(axis=1, keepdims=True))


def _root(is_short: Callable[[np.ndarray], np.ndarray], n: int) -> np.ndarray:
    """Where each of n rising functions reaches what it is held against, by doubling and halving."""
    high = np.ones(n)
    for _ in range(REACH):
        short = is_short(high)
        if not short.any():
            break
        high[short] *= 2.0
    low = np.zeros(n)
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        short = is_short(middle)
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return high


def placed_loads(before: np.ndarray, now: np.ndarray, ep: int, redundant: int) -> np.ndarray:
    """Loads of ranks [S, ep] in the present window, with experts copied and placed by those of the one before [S, E].

    The idea of DeepSeek's EPLB, its global policy (github.com/deepseek-ai/EPLB, readme; DeepSeek-V3, arXiv:2412.19437,
    section 3.4): the next copy goes to the expert whose copies are fullest, then, from the fullest on, each copy to the
    emptiest rank with a place left. Copies of an expert share its load alike.
    """
    samples = np.arange(len(now))
    copies = np.ones(before.shape)
    for _ in range(redundant):
        copies[samples, (before / copies).argmax(axis=1)] += 1.0
    slots = before.shape[1] + redundant
    each = np.repeat(np.tile(np.arange(before.shape[1]), len(now)), copies.astype(np.int64).ravel())
    expert = each.reshape(len(now), slots)
    planned, real = (np.take_along_axis(load / copies, expert, axis=1) for load in (before, now))
    order = np.argsort(-planned, axis=1, kind="stable")
    expected, loads, places = (np.zeros((len(now), ep)) for _ in range(3))
    for i in range(slots):
        slot = order[:, i]
        rank = np.where(places < slots // ep, expected, np.inf).argmin(axis=1)
        expected[samples, rank] += planned[samples, slot]
        loads[samples, rank] += real[samples, slot]
        places[samples, rank] += 1.0
    return loads
