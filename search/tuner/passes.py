"""The registry of passes: what each proposes to change. Decides nothing, for a judge does.

Theorems (dPRO, arXiv:2205.02473, section 4.4), with p a compute, q the bucket that it makes, e ends, d seconds alone:
1. Fuse p' and p if d(q') <= d(p') + d(p) - opfs_time(p', p): what fusing saves covers what the delay of q' costs.
2. Fuse q' and q if e(q') > e(p) + t_sync(s' + s, k*) - t_sync(s, k*).
3. Where one side is fused, the other is fused too.
They are sufficient, not necessary: what they promise is tried first and alone, the rest is judged case by case.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import entry_points

import numpy as np

from search.tuner.decisions import WHOLE, bucket_starts
from search.tuner.moves import Move, Pass, Seen

__all__ = ["DEFAULT", "GROUP", "GradientAccumulation", "MixedPrecision", "OpFusion", "Recomputation", "TensorFusion",
           "TensorPartition", "known_passes", "theorem_1", "theorem_2"]  # fmt: skip

GROUP = "trainspace.tuner_passes"
PART_BYTES = (1e6, 2e6, 4e6, 8e6, 16e6)
MICRO_BATCHES = (2, 4, 8, 16, 32)
SHIFT = 2  # gradients by which the border between two buckets is moved at a time, at most


def theorem_1(bucket_s: float, saved_s: float) -> bool:
    """Whether fusing two computes surely does not lose: the first one's bucket takes no longer than what is saved."""
    return bucket_s <= saved_s


def theorem_2(first_end_s: float, second_made_s: float, together_s: float, second_s: float) -> bool:
    """Whether fusing two buckets surely does not lose."""
    return first_end_s > second_made_s + together_s - second_s


class OpFusion:
    """Fuses computes that follow each other on the critical path, and takes apart what is fused."""

    name = "op_fusion"
    saves_memory = False

    def propose(self, seen: Seen) -> Iterator[tuple[Move, ...]]:
        """Theorem 1 first, with the buckets of both computes fused too (theorem 3); then the computes alone."""
        look = seen.look
        borders = _borders(seen)
        if seen.judge.ups.symmetry and seen.number == 0:
            yield from self._blocks(seen, borders)
        else:
            yield from (self._pair(seen, k) for k in borders.tolist())
        joined = np.flatnonzero(seen.decisions.ops & seen.free_ops)
        on_path = np.isin(look.group[_places(seen, joined)], seen.replayed.path_groups)
        op = np.array([g.op for g in seen.judge.shown.gradients], dtype=np.int64)
        for k in joined[on_path].tolist():
            border = int(np.searchsorted(op, k, side="right")) - 1  # the last gradient made before the cut
            both = "tensor_fusion" in seen.enabled and 0 <= border < len(seen.decisions.tensors)
            apart = (Move(ops_apart=(k,), tensors_apart=(border,)),) if both and seen.free_tensors[border] else ()
            yield (Move(ops_apart=(k,)), *apart)

    def _pair(self, seen: Seen, k: int) -> tuple[Move, ...]:
        look = seen.look
        (place,) = _places(seen, np.array([k]))
        before = np.flatnonzero(look.of_bucket == look.group[place])
        after = np.flatnonzero(look.of_bucket == look.group[place + 1])
        sure = theorem_1(float(look.dur[before].sum()), _saved(seen, k))
        alone = Move(ops=(k,), sure=sure and not len(before))
        if "tensor_fusion" not in seen.enabled or not len(before) or not len(after):
            return (alone,)
        return Move(ops=(k,), tensors=_between(seen, int(before[0]), int(after[-1])), sure=sure), alone

    def _blocks(self, seen: Seen, borders: np.ndarray) -> Iterator[tuple[Move, ...]]:
        """Borders of one class, in all blocks at once; those that stand alone one by one."""
        done = set[int]()
        for k in borders.tolist():
            number = int(seen.classes[k])
            if number in done:
                continue
            done.add(number)
            alike = borders[seen.classes[borders] == number].tolist()
            pairs = [self._pair(seen, j) for j in alike]
            both = [pair[0] for pair in pairs]
            moves = [Move(
                ops=tuple(j for one in both for j in one.ops), tensors=tuple(j for one in both for j in one.tensors),
                sure=all(one.sure for one in both),
            )]  # fmt: skip
            if any(len(pair) > 1 for pair in pairs):
                moves.append(Move(ops=tuple(alike)))
            yield tuple(moves)


class TensorFusion:
    """Fuses buckets that follow each other, and moves or cuts the borders of those that are fused."""

    name = "tensor_fusion"
    saves_memory = False

    def propose(self, seen: Seen) -> Iterator[tuple[Move, ...]]:
        """Theorem 2 first; with the computes that make them fused too (theorem 3) where that is on."""
        look, sync = seen.look, seen.judge.sync
        first = bucket_starts(seen.decisions, len(seen.decisions.tensors) + 1 if len(look.nbytes) else 0)
        for b in range(1, len(first)):
            if not seen.free_tensors[first[b] - 1]:
                continue
            whole = look.nbytes[b - 1 : b] + look.nbytes[b : b + 1]
            together = float(sync.seconds(whole, sync.parts_of(whole, seen.decisions.part_bytes))[0])
            sure = theorem_2(float(look.end[b - 1]), float(look.ready[b]), together, float(look.dur[b]))
            alone = Move(tensors=(int(first[b]) - 1,), sure=sure)
            yield (alone, *self._with_ops(seen, b, alone))
        for b in range(1, len(first)):  # the border itself may stand better elsewhere
            at = int(first[b]) - 1
            near = [at + step for step in (*range(-SHIFT, 0), *range(1, SHIFT + 1))]
            moves = [
                Move(tensors=(at,), tensors_apart=(to,))
                for to in near
                if 0 <= to < len(seen.decisions.tensors) and seen.free_tensors[[at, to]].all()
            ]
            if moves:
                yield tuple(moves)
        inside = np.flatnonzero(seen.decisions.tensors & seen.free_tensors)
        yield from ((Move(tensors_apart=(j,)),) for j in inside.tolist())

    def _with_ops(self, seen: Seen, b: int, alone: Move) -> Iterator[Move]:
        look = seen.look
        if "op_fusion" not in seen.enabled or look.of_bucket[b - 1] == look.of_bucket[b]:
            return
        laid = seen.judge.laid(seen.decisions, seen.judge.shown)
        places = np.arange(look.first[look.of_bucket[b - 1]], look.first[look.of_bucket[b]])
        if laid.joinable[places].all():
            yield Move(ops=tuple(laid.origin[places].tolist()), tensors=alone.tensors, sure=alone.sure)


class TensorPartition:
    """Cuts buckets into the number of parts that synchronises each fastest, or into parts of one size."""

    name = "tensor_partition"
    saves_memory = False

    def propose(self, seen: Seen) -> Iterator[tuple[Move, ...]]:
        """All sizes at once: parts do not delay what is made, only how it travels."""
        if len(seen.judge.sync.parts) > 1:
            yield tuple(Move(fields={"part_bytes": size}) for size in (None, WHOLE, *PART_BYTES))


class MixedPrecision:
    """Computes and sends in 16 bits: it changes what is computed, so it runs only where it is asked for."""

    name = "mixed_precision"
    saves_memory = False

    def propose(self, seen: Seen) -> Iterator[tuple[Move, ...]]:
        """On, once."""
        if not seen.decisions.mixed:
            yield (Move(fields={"mixed": True}, sure=True),)


class Recomputation:
    """Computes activations of modules again instead of keeping them."""

    name = "recomputation"
    saves_memory = True

    def propose(self, seen: Seen) -> Iterator[tuple[Move, ...]]:
        """More and more segments: those that free most bytes a second first."""
        job, chosen = seen.judge.shown, seen.judge.segments
        if job.keeps is None:
            return
        worth = []
        for s, segment in enumerate(chosen):
            inner = slice(segment.first, segment.last)
            again_s = float((job.seconds + job.lag_s)[:, inner].sum(axis=1).max())
            worth.append((float(job.keeps[inner].sum()) / max(again_s, 1e-12), s))
        order = [s for gain, s in sorted(worth, key=lambda one: (-one[0], one[1])) if gain > 0]
        yield from ((Move(fields={"recompute": frozenset(order[:n])}),) for n in range(1, len(order) + 1))


class GradientAccumulation:
    """Runs the batch in micro-batches, and synchronises after the last."""

    name = "gradient_accumulation"
    saves_memory = True

    def propose(self, seen: Seen) -> Iterator[tuple[Move, ...]]:
        """More and more micro-batches."""
        yield from ((Move(fields={"accumulate": a}),) for a in MICRO_BATCHES)


OURS: tuple[Pass, ...] = (
    MixedPrecision(), TensorPartition(), OpFusion(), TensorFusion(), Recomputation(), GradientAccumulation(),
)  # fmt: skip
DEFAULT = ("op_fusion", "tensor_fusion", "tensor_partition", "recomputation", "gradient_accumulation")


@lru_cache(maxsize=1)
def known_passes() -> dict[str, Pass]:
    """Ours and those of installed packages, by name; ValueError names one that cannot be used."""
    found: dict[str, Pass] = {one.name: one for one in OURS}
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        where = f"{GROUP}: {point.name} = {point.value}"
        try:
            made = point.load()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{where} cannot be loaded ({error}); mend or uninstall it") from error
        made = made() if isinstance(made, type) else made
        for needs in ("name", "saves_memory", "propose"):
            if not hasattr(made, needs):
                raise ValueError(
                    f"{where} must have name, saves_memory and propose, but lacks {needs}; see docs/traces.md"
                )
        if made.name in found:
            raise ValueError(f"{where} must have a name of its own, but {made.name!r} is taken; give another")
        found[made.name] = made
    return found


def _places(seen: Seen, joins: np.ndarray) -> np.ndarray:
    """The last element of each of these computes: in the micro-batch whose gradients travel."""
    origin = seen.judge.laid(seen.decisions, seen.judge.shown).origin
    last = np.zeros(len(seen.decisions.ops) + 1, np.int64)
    normal = np.flatnonzero(origin >= 0)
    last[origin[normal]] = normal
    found: np.ndarray = last[joins]
    return found


def _borders(seen: Seen) -> np.ndarray:
    """Open joins of computes between two groups, the first of which is on the critical path, in order."""
    laid = seen.judge.laid(seen.decisions, seen.judge.shown)
    open_joins = np.flatnonzero(seen.free_ops & ~seen.decisions.ops)
    places = _places(seen, open_joins)
    fits = (places < len(laid.joinable)) & laid.joinable[np.minimum(places, len(laid.joinable) - 1)]
    group = seen.look.group[places]
    found: np.ndarray = open_joins[fits & np.isin(group, seen.replayed.path_groups)]
    return found


def _saved(seen: Seen, k: int) -> float:
    saves = seen.judge.shown.saves_s
    return 0.0 if saves is None else float(saves[k])


def _between(seen: Seen, first: int, last: int) -> tuple[int, ...]:
    """Joins that put buckets first ... last into one."""
    starts = bucket_starts(seen.decisions, len(seen.decisions.tensors) + 1)
    return tuple(int(starts[b]) - 1 for b in range(first + 1, last + 1))
