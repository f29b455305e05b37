"""Tables of docs/traces.md about the tuner: `python -m tests.search.tuner.tables` prints them anew.

Jobs of models' sizes, so every figure is simulated; those of search times are of the machine that ran them.
"""

from __future__ import annotations

import sys
import time

from capture.traces.records import Topology
from capture.traces.synthesise import synthesise
from capture.traces.what_if import Change
from estimator.replay import replay
from search.tuner.baselines import baselines
from search.tuner.judge import Judge, SpeedUps
from search.tuner.subject import sized_subject
from search.tuner.tune import DRIVERS, Options, tune

MODELS = {"bert_base": "BERT-Base", "resnet50": "ResNet-50", "vgg16": "VGG-16", "inception_v3": "Inception-v3"}
RING, SERVERS = Topology.RING, Topology.PARAMETER_SERVER
CLUSTERS = {
    "ring, 100 Gbit/s": Change(), "ring, 25 Gbit/s": Change(bandwidth=0.25),
    "16 servers, 100 Gbit/s": Change(topology=SERVERS, servers=16),
    "16 servers, 25 Gbit/s": Change(topology=SERVERS, servers=16, bandwidth=0.25),
}  # fmt: skip
OPS, TENSORS = ("op_fusion",), ("tensor_fusion", "tensor_partition")
KINDS = (OPS, TENSORS, (*OPS, *TENSORS))
WORKERS = (16, 32, 64, 128)
STEPS = {
    "none": SpeedUps(coarse=False, partial=False, symmetry=False),
    "coarsened view": SpeedUps(partial=False, symmetry=False), "+ partial replay": SpeedUps(symmetry=False),
    "+ symmetry": SpeedUps(),
}  # fmt: skip
BUDGET = 4.5e9


def ms(seconds):
    return f"{seconds * 1e3:.1f}"


def against_defaults(model, cluster):
    """A row: no fusion, XLA's, the library's default and its best, op fusion, tensor fusion, both; gains."""
    subject = sized_subject(model, CLUSTERS[cluster])
    found = [tune(subject, Options(passes=passes)) for passes in KINDS]
    rows = {row.name: row for row in found[0].rows}
    xla = next(row for name, row in rows.items() if name.startswith("XLA"))
    usual = rows.get("Horovod (64 MB, 5 ms)") or rows["BytePS (4 MB)"]
    other = rows.get("Horovod autotune") or rows["BytePS, priorities"]
    tuned = [one.best.mean_s for one in found]
    cells = [ms(rows["no fusion"].mean_s), ms(xla.mean_s), ms(usual.mean_s), ms(other.mean_s), *map(ms, tuned)]
    faster = [f"{row.mean_s / tuned[-1] - 1.0:+.1%}".replace("%", " %") for row in (xla, usual)]
    return f"| {MODELS[model]} | {cluster} | {' | '.join([*cells, *faster])} |"


def memory_rows():
    """BERT-Base with a batch of 64: as it is, and within the budget by one pass, the other, and the tuner's choice."""
    subject = sized_subject("bert_base", Change(), batch=64)
    free = tune(subject, Options(passes=(*OPS, *TENSORS)))
    rows = [("no fusion", free.rows[0]), ("tuned, no budget", free.best)]
    for name, savers in (
        ("recomputation", ("recomputation",)), ("gradient accumulation", ("gradient_accumulation",)),
        ("either", ("recomputation", "gradient_accumulation")),
    ):  # fmt: skip
        found = tune(subject, Options(passes=(*OPS, *TENSORS, *savers), budget_bytes=BUDGET))
        rows.append((f"tuned, {name}", found.best))
    return [f"| {name} | {row.peak_bytes / 1e9:.2f} | {ms(row.mean_s)} |" for name, row in rows]


def driver_rows():
    """Each driver on BERT-Base and ResNet-50 over 25 Gbit/s."""
    out = []
    for driver in DRIVERS:
        cells = [ms(tune(sized_subject(model, Change(bandwidth=0.25)), Options(driver=driver)).best.mean_s)
                 for model in ("bert_base", "resnet50")]  # fmt: skip
        out.append(f"| `{driver}` | {' | '.join(cells)} |")
    return out


def larger_rows(model="bert_base"):
    """Simulated iterations on more and more workers, 100 Gbit/s."""
    out = []
    for workers in WORKERS:
        found = tune(sized_subject(model, Change(workers=workers)), Options())
        rows = {row.name: row for row in found.rows}
        xla, usual = rows["XLA, Horovod buckets"], rows["Horovod (64 MB, 5 ms)"]
        cells = [ms(row.mean_s) for row in (rows["no fusion"], xla, usual, found.best)]
        faster = f"{xla.mean_s / found.best.mean_s - 1.0:+.1%}".replace("%", " %")
        out.append(f"| {workers} | {' | '.join([*cells, faster, ms(found.best.daydream_s)])} |")
    return out


def search_row(name, model="bert_base", workers=16):
    """Processor seconds to tune with some speed-ups, baselines and final replays included: of this machine."""
    subject = sized_subject(model, Change(workers=workers, bandwidth=0.25))
    start = time.process_time()
    found = tune(subject, Options(ups=STEPS[name]))
    took = time.process_time() - start
    return f"| {name} | {found.judged:,} | {found.replays:,} | {took:.1f} | {ms(found.best.mean_s)} |"


def scaling_rows(model="bert_base"):
    """Processor seconds to replay DDP's buckets on more and more workers, each by itself and folded, here."""
    out = []
    for workers in WORKERS:
        judge = Judge(sized_subject(model, Change(workers=workers)), SpeedUps())
        one = next(b.decisions for b in baselines(judge) if b.name.startswith("DDP"))
        made = synthesise(*judge.job_of(one, judge.shown), judge.subject.wire)
        took = [min(_took(lambda made=made: replay(made.tasks, ready=made.ready)) for _ in range(3)),
                min(_took(lambda judge=judge, one=one: judge.replayed(one)) for _ in range(3))]  # fmt: skip
        rate = len(made.tasks) / took[0] / 1e6
        out.append(f"| {workers} | {len(made.tasks):,} | {took[0]:.3f} | {rate:.1f} | {took[1]:.4f} |")
    return out


def _took(work):
    start = time.process_time()
    work()
    return time.process_time() - start


def main(wanted):
    if not wanted or "defaults" in wanted:
        for model in MODELS:
            for cluster in CLUSTERS:
                print(against_defaults(model, cluster), flush=True)
    for name, rows in (("memory", memory_rows), ("drivers", driver_rows), ("larger", larger_rows),
                       ("scaling", scaling_rows)):  # fmt: skip
        if not wanted or name in wanted:
            print("\n".join(["", *rows()]), flush=True)
    for name in (name for name in reversed(STEPS) if "search" in wanted):
        print(search_row(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
