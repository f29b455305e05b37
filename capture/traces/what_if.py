"""What a measured job would take with other buckets, workers, links or topology: its computes kept, its traffic anew.

From one iteration of a global graph comes a job (synthesise.py): every rank's computes with their own seconds and lags,
the gradients that they make, and the link that its transfers show. What is asked for replaces what was measured, one
iteration at a time, so that mean and spread are those of replayed iterations. Knows no file and prints nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from capture.traces.beside import Delays, bytes_beside, delayed, delays_of, host_s_per_byte, left_of, usual_messages
from capture.traces.dfg import GlobalDfg
from capture.traces.operations import OPS, Op
from capture.traces.recomputed import recomputed
from capture.traces.records import Topology
from capture.traces.synthesise import (
    Bucket,
    Gradient,
    Job,
    Link,
    Synthetic,
    Wire,
    buckets,
    size_over_bandwidth,
    synthesise,
)
from estimator.tasks import Category

__all__ = ["Change", "Measured", "Prediction", "changed", "check_topology", "link_of", "measured_job", "message_delays",
           "named", "predict"]  # fmt: skip

PREFIXES = (
    ("FW", Category.FORWARD),
    ("BW.again", Category.RECOMPUTE),
    ("BW", Category.BACKWARD),
    ("UPD", Category.OPTIMIZER),
)
MANY = 1_000_000  # buckets on their way at once: servers take all that are ready
WHOLE = 0.01  # by which gradients may miss the bytes of their bucket: padding
BOUNDS = (
    ("bandwidth", 1e-6, 1e6, " times as fast"), ("compute", 1e-6, 1e6, " times as fast"), ("latency_s", 0.0, 1e3, " s"),
    ("bucket_bytes", 1.0, np.inf, ""), ("workers", 1, 100_000, ""), ("servers", 1, 100_000, ""),
    ("per_machine", 1, 100_000, ""), ("part_bytes", 1.0, np.inf, ""),
)  # fmt: skip
SERVED = (
    ("servers", 1, (Topology.PARAMETER_SERVER,)), ("per_machine", 1, (Topology.HIERARCHICAL,)),
    ("part_bytes", np.inf, (Topology.TREE, Topology.PARAMETER_SERVER)),
    ("colocated", False, (Topology.PARAMETER_SERVER,)),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is asked for; None: as measured. bandwidth, compute: times as fast. bucket_bytes: of gradients.

    colocated: servers are workers too. half_duplex: both directions between two workers take turns. recompute: modules
    whose forward runs again in the backward pass.
    """

    bandwidth: float = 1.0
    compute: float = 1.0
    latency_s: float | None = None
    bucket_bytes: float | None = None
    workers: int | None = None
    topology: Topology | None = None
    servers: int = 1
    per_machine: int = 1
    part_bytes: float = float("inf")
    colocated: bool = False
    half_duplex: bool = False
    recompute: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, least, most, unit in BOUNDS:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                above = "" if most == np.inf else f" and at most {most:g}"
                raise ValueError(
                    f"{name} must be at least {least:g}{above}{unit}, but is {value}; leave it out to change nothing"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One iteration as a job: what its workers compute, its buckets and its wire."""

    number: int
    job: Job
    cut: tuple[Bucket, ...]
    wire: Wire
    can_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """[I] seconds each: replayed under the change, and size / bandwidth on the same jobs. shown: the last of them."""

    seconds: np.ndarray
    size_over_bandwidth_s: np.ndarray
    shown: Synthetic
    notices: tuple[str, ...]


def predict(dfg: GlobalDfg, change: Change, alone: GlobalDfg | None = None) -> Prediction:
    """Every iteration under the change, of a graph without hosts. ValueError where it does not hold what it needs.

    Messages that were recorded one by one vary: each new one is delayed as one of the same iteration was, drawn with a
    fixed seed, for a mean before a maximum would bias low. alone: the same job with
    nothing to synchronise, which tells what transfers cost the computes beside them.
    """
    dfg = named(dfg)
    link, topology, notices = link_of(dfg)
    if alone is not None:
        link = replace(link, host_s_per_byte=host_s_per_byte(dfg, alone))
    dfg = replace(dfg, seconds=left_of(dfg.seconds, bytes_beside(dfg), link.host_s_per_byte))
    spans, plain, shown = [], [], None
    for number in dfg.iterations:
        job, cut, wire = changed(measured_job(dfg, number), link, topology, change)
        shown = delayed(synthesise(job, cut, wire), message_delays(dfg, number, link), number)
        spans.append(shown.run().span_s)
        plain.append(size_over_bandwidth(job, cut, wire))
    assert shown is not None
    return Prediction(
        seconds=np.array(spans), size_over_bandwidth_s=np.array(plain), shown=shown, notices=tuple(notices)
    )


def message_delays(dfg: GlobalDfg, number: int, link: Link) -> Delays:
    """What messages of an iteration take beyond what the link says; of collectives as a whole nothing is known."""
    return delays_of(dfg, number, link, dfg.seconds + dfg.lag_s + _send_lag_s(dfg))


def _send_lag_s(dfg: GlobalDfg) -> float:
    sends = dfg.is_op(Op.SEND)
    return float(dfg.lag_s[sends].mean()) if sends.any() else 0.0


def _reduces(dfg: GlobalDfg) -> np.ndarray:
    """[K] bool: computes that add up what came."""
    leads = np.zeros(len(dfg), np.bool_)
    leads[dfg.after[dfg.is_op(Op.RECV)[dfg.before]]] = True
    sent = np.unique(dfg.tensor[dfg.is_op(Op.RECV) & (dfg.tensor >= 0)])
    reduces: np.ndarray = leads & dfg.is_op(Op.COMPUTE) & np.isin(dfg.tensor, sent)
    return reduces


def changed(one: Measured, link: Link, topology: Topology, change: Change) -> tuple[Job, list[Bucket], Wire]:
    """A measured job as it is asked for."""
    cut, kind = list(one.cut), change.topology or topology
    check_topology(change, kind)
    if change.bucket_bytes is not None:
        if not one.can_cut:
            raise ValueError(
                "buckets can be cut anew where the trace says the bytes of each gradient and its bucket, but this one "
                "does not; record with tensor names and sizes"
            )
        cut = buckets(one.job.gradients, change.bucket_bytes)
    job = replace(one.job, seconds=one.job.seconds / change.compute, lag_s=one.job.lag_s / change.compute)
    if change.recompute is not None:
        job, cut = recomputed(job, cut, change.recompute)
    if change.workers is not None:
        job = job.of_workers(change.workers)
    latency_s = link.latency_s if change.latency_s is None else change.latency_s
    wire = replace(
        one.wire, topology=kind, servers=change.servers, per_machine=change.per_machine,
        part_bytes=change.part_bytes, colocated=change.colocated, half_duplex=change.half_duplex,
        lanes=MANY if kind is Topology.PARAMETER_SERVER else one.wire.lanes,
        link=replace(link, bytes_per_s=link.bytes_per_s * change.bandwidth, latency_s=latency_s),
    )  # fmt: skip
    return job, cut, wire


def check_topology(change: Change, kind: Topology) -> None:
    """ValueError where the change says what a topology has not."""
    for name, absent, kinds in SERVED:
        if getattr(change, name) != absent and kind not in kinds:
            have = " or ".join(f"topology={t.value}" for t in kinds)
            raise ValueError(f"{name} says nothing of a topology {kind.value}; add {have}, or leave it out")


def measured_job(dfg: GlobalDfg, number: int) -> Measured:
    """One iteration as a job. ValueError where ranks compute different things or nothing is communicated."""
    ops = np.flatnonzero(dfg.iteration == number)
    node, is_in = dfg.node, dfg.is_op(Op.IN)
    sent = np.unique(dfg.tensor[ops[is_in[ops] & (dfg.tensor[ops] >= 0)]])
    if not len(sent):
        raise ValueError(
            f"a what-if needs tensors that are communicated, but iteration {number} names none; record with tensors"
        )
    rows = [_computes(dfg, ops[node[ops] == r], sent) for r in range(len(dfg.ranks))]
    names = [[dfg.names[k] for k in dfg.name[row]] for row in rows]
    if any(len(row) != len(names[0]) for row in names):
        raise ValueError(
            f"a what-if needs ranks that compute the same, but in iteration {number} they have "
            f"{sorted({len(row) for row in names})} operations; replay it as measured"
        )
    first = rows[0]
    cut, gradients, can_cut = _gradients(dfg, ops, first, sent)
    waits = _waits(dfg, first)
    release = np.array([float(dfg.release_s[ops[node[ops] == r]].max(initial=0.0)) for r in range(len(rows))])
    job = Job(
        names=tuple(names[0]), category=tuple(_category(name) for name in names[0]),
        seconds=np.array([dfg.seconds[row] for row in rows]), lag_s=np.array([dfg.lag_s[row] for row in rows]),
        release_s=release, waits=waits, gradients=gradients, copy_s_per_byte=_copy_rate(dfg, ops, sent),
    )  # fmt: skip
    wire = Wire(topology=Topology.RING, link=Link(bytes_per_s=1.0))
    return Measured(number=number, job=job, cut=cut, wire=wire, can_cut=can_cut)


def named(dfg: GlobalDfg) -> GlobalDfg:
    """The graph with a tensor for each collective that has none: numbered within its iteration."""
    tensor, op = dfg.tensor.copy(), np.array(OPS)[dfg.op]
    meets = np.flatnonzero((op == Op.MEETING) & (tensor < 0))
    meets = meets[np.lexsort((dfg.start_s[meets], dfg.iteration[meets]))]
    first = np.searchsorted(dfg.iteration[meets], dfg.iteration[meets])
    tensor[meets] = len(dfg.tensors) + np.arange(len(meets)) - first
    for source, target, ahead in ((Op.IN, Op.MEETING, False), (Op.MEETING, Op.COLLECTIVE, True),
                                  (Op.COLLECTIVE, Op.OUT, True)):  # fmt: skip
        edges = (op[dfg.before] == source) & (op[dfg.after] == target)
        known, told = (dfg.before, dfg.after) if ahead else (dfg.after, dfg.before)
        new = edges & (tensor[told] < 0)
        tensor[told[new]] = tensor[known[new]]
    count = int(tensor.max(initial=-1)) + 1 - len(dfg.tensors)
    names = tuple(f"collective {k}" for k in range(max(count, 0)))
    return replace(dfg, tensor=tensor, tensors=(*dfg.tensors, *names))


def _computes(dfg: GlobalDfg, mine: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """A rank's computes in order, without those of communication: copies into buckets and reductions."""
    computes = mine[dfg.is_op(Op.COMPUTE)[mine] & ~np.isin(dfg.tensor[mine], sent)]
    return computes[np.argsort(dfg.start_s[computes], kind="stable")]


def _category(name: str) -> Category:
    return next((category for prefix, category in PREFIXES if name.startswith(prefix)), Category.OTHER)


def _waits(dfg: GlobalDfg, row: np.ndarray) -> int:
    """The first compute that waits for the last tensor: the one that most Outs lead to."""
    place = {int(i): k for k, i in enumerate(row)}
    outs = dfg.is_op(Op.OUT)[dfg.before]
    led = [place[int(a)] for a in dfg.after[outs] if int(a) in place]
    return max(led, default=len(row))


def _gradients(
    dfg: GlobalDfg, ops: np.ndarray, row: np.ndarray, sent: np.ndarray
) -> tuple[tuple[Bucket, ...], tuple[Gradient, ...], bool]:
    """Buckets as measured on the first rank, their gradients, and whether these may be put into other buckets."""
    place = {int(i): k for k, i in enumerate(row)}
    heads = {int(i): int(dfg.tensor[i]) for i in ops[dfg.is_op(Op.IN)[ops] & (dfg.node[ops] == 0)]}
    makers: dict[int, list[int]] = defaultdict(list)
    feeds: dict[int, list[int]] = defaultdict(list)
    for b, a in zip(dfg.before.tolist(), dfg.after.tolist(), strict=True):
        feeds[a].append(b)
    for head, tensor in heads.items():
        for b in feeds[head]:
            # Behind a copy into the bucket stand the gradients themselves.
            for maker in [b] if b in place else feeds[b]:
                if maker in place:
                    makers[tensor].append(place[maker])
    copied = _copied(dfg, ops, sent, place, feeds)
    nbytes = _bytes_of(dfg, ops, sent)
    found, gradients, can_cut = [], [], True
    for tensor in sent.tolist():
        made = sorted(set(copied[tensor] or makers[tensor])) or [0]
        found.append(Bucket(nbytes=nbytes[tensor], op=made[-1], names=(dfg.tensors[tensor],)))
        sizes = np.nan_to_num(dfg.nbytes[row[made]])
        can_cut = can_cut and abs(float(sizes.sum()) - nbytes[tensor]) <= WHOLE * nbytes[tensor]
        gradients += [
            Gradient(name=_made_by(dfg, int(row[k])), nbytes=float(size), op=k)
            for k, size in zip(made, sizes.tolist(), strict=True)
        ]
    order = sorted(found, key=lambda bucket: bucket.op)
    return tuple(order), tuple(sorted(gradients, key=lambda gradient: gradient.op)), can_cut


def _copied(
    dfg: GlobalDfg, ops: np.ndarray, sent: np.ndarray, place: dict[int, int], feeds: dict[int, list[int]]
) -> dict[int, list[int]]:
    """What is copied into each bucket, where the trace has copies that tell their bytes: no transfer says it better."""
    copied: dict[int, list[int]] = defaultdict(list)
    copies = dfg.is_op(Op.COMPUTE)[ops] & np.isin(dfg.tensor[ops], sent) & (dfg.node[ops] == 0) & (dfg.nbytes[ops] > 0)
    for i in ops[copies].tolist():
        copied[int(dfg.tensor[i])] += [place[b] for b in feeds[i] if b in place and dfg.nbytes[b] > 0]
    return copied


def _made_by(dfg: GlobalDfg, op: int) -> str:
    """What the gradient of a compute is called: the tensor that it makes, where that is told."""
    return dfg.tensors[dfg.tensor[op]] if dfg.tensor[op] >= 0 else dfg.names[dfg.name[op]]


def _bytes_of(dfg: GlobalDfg, ops: np.ndarray, sent: np.ndarray) -> dict[int, float]:
    """Bytes of each tensor: of its collective, its copy, or of all that a rank of n receives, times n / 2 (n - 1)."""
    out = {}
    mine = ops[dfg.node[ops] == 0]
    n = len(dfg.ranks)
    for tensor in sent.tolist():
        of = mine[dfg.tensor[mine] == tensor]
        whole, chunks = of[dfg.is_op(Op.COLLECTIVE, Op.COMPUTE)[of]], of[dfg.is_op(Op.RECV)[of]]
        whole = whole[dfg.nbytes[whole] > 0]  # of reductions, and of copies that tell none, nothing is known
        total = dfg.nbytes[whole].max() if len(whole) else dfg.nbytes[chunks].sum() * n / max(2 * (n - 1), 1)
        if not total > 0:
            raise ValueError(
                f"a what-if needs the bytes of each tensor, but {dfg.tensors[tensor]!r} has none; record sizes"
            )
        out[tensor] = float(total)
    return out


def _copy_rate(dfg: GlobalDfg, ops: np.ndarray, sent: np.ndarray) -> float:
    """Seconds a byte of copies into buckets: computes on a bucket that lead to its In."""
    leads = np.zeros(len(dfg), np.bool_)
    leads[dfg.before[dfg.is_op(Op.IN)[dfg.after]]] = True
    mine = ops[dfg.is_op(Op.COMPUTE)[ops] & np.isin(dfg.tensor[ops], sent) & leads[ops] & (dfg.node[ops] == 0)]
    if not len(mine):
        return 0.0
    nbytes = _bytes_of(dfg, ops, sent)
    return float(dfg.seconds[mine].sum() / sum(nbytes[int(t)] for t in dfg.tensor[mine]))


def _in_turn_s(dfg: GlobalDfg, moves: np.ndarray) -> np.ndarray:
    """Seconds of collectives that shared a link, as if it had served them in the order in which their ranks met.

    Measured, a small one that overtakes a large one takes long and leaves it little; in turn, each takes by its bytes.
    """
    met = np.full(len(dfg), -np.inf)
    meets = dfg.is_op(Op.MEETING)[dfg.before]
    met[dfg.after[meets]] = dfg.start_s[dfg.before[meets]]
    ops = np.flatnonzero(moves)
    seconds, free = np.zeros(len(dfg)), dict[int, float]()
    for i in ops[np.lexsort((dfg.end_s[ops], met[ops]))].tolist():
        start = max(float(met[i]), free.get(int(dfg.queue[i]), -np.inf))
        free[int(dfg.queue[i])] = end = max(float(dfg.end_s[i]), start)
        seconds[i] = end - start
    return seconds[ops]


def link_of(dfg: GlobalDfg) -> tuple[Link, Topology, list[str]]:
    """The link that transfers of all iterations show, by least squares of seconds = latency + bytes / rate.

    Of messages, the median of each size that was sent beside no compute: what delays single ones is no property of the
    link (beside.py). Of collectives, a ring's: 2 (n - 1) messages of a bucket's n-th part. Where all have one size,
    latency cannot be told from rate, and counts as none.
    """
    moves = dfg.is_op(Op.RECV) & (dfg.nbytes > 0)
    if moves.any():
        size, seconds = usual_messages(dfg)
        adds = (dfg.seconds + dfg.lag_s)[_reduces(dfg)].sum() / dfg.nbytes[moves].sum()
        link, notices = _fitted(size, seconds)
        served = dfg.topology is Topology.PARAMETER_SERVER
        kind = Topology.PARAMETER_SERVER if served else Topology.RING
        return replace(link, reduce_s_per_byte=float(adds)), kind, notices
    n, moves = len(dfg.ranks), dfg.is_op(Op.COLLECTIVE) & (dfg.nbytes > 0)
    if not moves.any():
        raise ValueError("a what-if needs transfers whose bytes are known, but there are none; record sizes")
    link, notices = _fitted(dfg.nbytes[moves] / n, _in_turn_s(dfg, moves) / (2 * (n - 1)))
    return link, Topology.RING, ["collectives are known as a whole: they count as rings", *notices]


def _fitted(size: np.ndarray, seconds: np.ndarray) -> tuple[Link, list[str]]:
    if np.ptp(size) > WHOLE * size.max():
        per_byte, latency = np.polyfit(size, seconds, 1)
        if per_byte > 0.0 and latency >= 0.0:
            return Link(bytes_per_s=float(1.0 / per_byte), latency_s=float(latency)), []
        notices = []
    else:
        notices = ["all transfers have one size: latency cannot be told from rate and counts as none"]
    if not seconds.sum() > 0.0:
        raise ValueError("a what-if needs transfers that take time, but none does; record with times, and align clocks")
    return Link(bytes_per_s=float(size.sum() / seconds.sum())), notices
