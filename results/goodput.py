"""What share of its time a training job that fails, checkpoints and restarts spends on steps that count.

Failures come at a constant rate, independently; a checkpoint stops training for as long as it is written; what was done
since the last one is lost. Neglected: failures during a checkpoint of the storage itself, slow nodes, and that spares
fail while they wait.

Letters: M mean time between failures, C seconds of a checkpoint, W seconds of work between two, R seconds of a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hardware.units import HOUR

__all__ = ["Goodput", "Reliability", "goodput", "interval_s", "spares_needed", "up_share", "working_share"]

Floats = NDArray[np.float64]

MOST_AWAY = 700.0  # nodes in repair at once, in the mean: e^-700 is still a double, and no cluster is run like that


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """What a plan assumes of failures and of what follows them; None: worked out, or as the catalogue has it.

    Attributes:
        chip_failures_per_hour: interruptions that a chip causes; None: the catalogue's.
        node_failures_per_hour: interruptions that a node causes beside its chips' (the catalogue's count both).
        checkpoint_s: seconds that training stands still for a checkpoint; None: its bytes over what nodes write.
        checkpoint_bytes_per_parameter: bf16 weights 2, fp32 copy 4, two fp32 moments 8.
        node_write_bytes_per_s: of a node into the storage of checkpoints. Llama 3 (arXiv:2407.21783, section 3.3.1):
            2 TB/s sustained beneath 2,048 hosts.
        restart_s: from a failure to the first step that counts again; assumption. Llama 3 trained more than 90 % of
            the time through 466 interruptions in 54 days, which leaves at most 1001 s for each, lost work included.
        broken_share: share of failures that take the node away. Llama 3, section 3.3.4: 78 % confirmed or suspected
            hardware.
        repair_s: until a node that was taken away is back; assumption: a day.
        spare_nodes: nodes that wait; None: the fewest with which the job has all its nodes `up_target` of the time.
    """

    chip_failures_per_hour: float | None = None
    node_failures_per_hour: float = 0.0
    checkpoint_s: float | None = None
    checkpoint_bytes_per_parameter: float = 14.0
    node_write_bytes_per_s: float = 1e9
    restart_s: float = 600.0
    broken_share: float = 0.78
    repair_s: float = 86_400.0
    spare_nodes: int | None = None
    up_target: float = 0.999

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and not 0.0 <= value < np.inf:
                raise ValueError(f"{f.name} must be a number of at least 0, but got {value}")
        for name in ("broken_share", "up_target"):
            if getattr(self, name) > 1.0:
                raise ValueError(f"{name} must be a share of at most 1, but got {getattr(self, name)}")
        if self.up_target == 1.0 and self.spare_nodes is None:
            raise ValueError("up_target must be below 1, for no number of spares is always enough; try 0.999")
        if self.node_write_bytes_per_s == 0.0 and self.checkpoint_s is None:
            raise ValueError("node_write_bytes_per_s must be above 0, or checkpoint_s given; got 0")

    @classmethod
    def parse(cls, words: Sequence[str]) -> Reliability:
        """From KEY=VALUE words; ValueError names the keys.

        >>> Reliability.parse(["restart_s=300", "spare_nodes=4"]).spare_nodes
        4
        """
        names = [f.name for f in fields(cls)]
        values: dict[str, float | int] = {}
        for word in words:
            key, equals, text = word.partition("=")
            if not equals or key not in names:
                raise ValueError(f"--goodput takes KEY=VALUE or off, but got {word!r}; keys: {', '.join(names)}")
            try:
                values[key] = int(text) if key == "spare_nodes" else float(text)
            except ValueError:
                kind = "a whole number" if key == "spare_nodes" else "a number"
                raise ValueError(f"--goodput {key} must be {kind}, but got {text!r}") from None
        return cls(**values)  # type: ignore[arg-type]  # keys and kinds are checked above


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What comes of failures at each point, `[N]` each. `share`: of wall time on steps that count."""

    share: Floats
    mtbf_s: Floats
    checkpoint_s: Floats
    interval_s: Floats
    spare_nodes: Floats
    up_share: Floats


def interval_s(checkpoint_s: ArrayLike, mtbf_s: ArrayLike) -> Floats:
    """W = sqrt(2 C M): Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17(9).

    >>> float(interval_s(50.0, 10_000.0))
    1000.0
    """
    return np.sqrt(2.0 * _floats(checkpoint_s) * _floats(mtbf_s))


def working_share(work_s: ArrayLike, checkpoint_s: ArrayLike, restart_s: float, mtbf_s: ArrayLike) -> Floats:
    """W / (M exp(R/M) (exp((W + C)/M) - 1)), 1 where nothing fails or is written.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22(3): expected wall time of a job whose failures are exponential, during restarts too.
    """
    w, c, m = np.broadcast_arrays(_floats(work_s), _floats(checkpoint_s), _floats(mtbf_s))
    fails = np.isfinite(m)
    mean = np.where(fails, m, 1.0)
    with np.errstate(over="ignore"):  # a job that hardly ever gets through takes for ever
        wall = mean * np.exp(restart_s / mean) * np.expm1((w + c) / mean)
    return np.where(fails, w / wall, w / (w + c))


def up_share(failures_per_s: ArrayLike, repair_s: float, spare_nodes: ArrayLike) -> Floats:
    """Share of time in which no more nodes are away than there are spares: sum of a^k exp(-a) / k! for k up to s.

    Nodes in repair are Poisson with mean a = rate * repair, whatever the distribution of repairs (Palm 1938; in
    Takács 1962, "Introduction to the Theory of Queues", M/G/infinity). Ignores that a job that waits does not fail.
    """
    a, s = np.broadcast_arrays(_floats(failures_per_s) * repair_s, _floats(spare_nodes))
    term, total = np.exp(-a), np.exp(-a)
    for k in range(1, int(s.max(initial=0.0)) + 1):
        term = term * a / k
        total = total + np.where(k <= s, term, 0.0)
    return np.minimum(total, 1.0)


def spares_needed(failures_per_s: float, repair_s: float, target: float) -> int:
    """The fewest spare nodes with which `up_share` reaches a target below 1.

    >>> spares_needed(1.0 / 86_400.0, 86_400.0, 0.9)
    2
    """
    a = failures_per_s * repair_s
    term = total = float(np.exp(-a))
    spares = 0
    while total < target and term > 0.0:
        spares += 1
        term *= a / spares
        total += term
    return spares


def goodput(
    reliability: Reliability, *, failures_per_s: ArrayLike, num_gpus: ArrayLike, num_nodes: ArrayLike,
    step_time_s: ArrayLike, parameters: float,
) -> Goodput:  # fmt: skip
    """Goodput of `[N]` points. Checkpoints come after whole steps, at the step nearest to Young's interval.

    `failures_per_s`: of all chips that work, as the catalogue has it.
    """
    r = reliability
    chips, nodes, step, known = np.broadcast_arrays(
        _floats(num_gpus), _floats(num_nodes), _floats(step_time_s), _floats(failures_per_s)
    )
    of_chips = known if r.chip_failures_per_hour is None else chips * r.chip_failures_per_hour / HOUR
    rate = of_chips + nodes * r.node_failures_per_hour / HOUR
    fails = rate > 0.0
    mtbf = np.where(fails, 1.0 / np.where(fails, rate, 1.0), np.inf)
    if r.checkpoint_s is None:
        checkpoint = r.checkpoint_bytes_per_parameter * parameters / (nodes * r.node_write_bytes_per_s)
    else:
        checkpoint = np.full_like(rate, r.checkpoint_s)
    wanted = interval_s(checkpoint, np.where(fails, mtbf, 0.0))
    work = np.where(fails, np.maximum(1.0, np.rint(wanted / step)) * step, np.inf)
    share = np.where(fails, working_share(np.where(fails, work, 1.0), checkpoint, r.restart_s, mtbf), 1.0)
    broken = rate * r.broken_share
    if (broken * r.repair_s > MOST_AWAY).any():
        away = float((broken * r.repair_s).max())
        law = f"at most {MOST_AWAY:g} nodes may be in repair at once, but with these rates {away:,.0f} are"
        raise ValueError(f"{law}; check chip_failures_per_hour, node_failures_per_hour and repair_s")
    spares = np.array([spares_needed(float(x), r.repair_s, r.up_target) for x in broken.reshape(-1)])
    if r.spare_nodes is not None:
        spares = np.full_like(rate, r.spare_nodes)
    up = up_share(broken, r.repair_s, spares)
    return Goodput(
        share=share * up,
        mtbf_s=mtbf,
        checkpoint_s=checkpoint,
        interval_s=work,
        spare_nodes=_floats(spares),
        up_share=up,
    )


def _floats(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)
