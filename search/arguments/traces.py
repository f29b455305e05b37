"""Commands about measured traces: trace record, import, show, align, replay, tune, testbed, diff."""

from __future__ import annotations

import argparse

from search.arguments.parser import Commands, number_such_as, positive, whole

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds them, in the order of the help."""
    trace = commands.group("trace", "what ranks of a real job recorded: read, checked and compared")
    record = trace.add(
        "record",
        "trace_record",
        "runs a command that trains with torch and records each of its ranks, one file a rank, into the folder of -o "
        "(default: trace-DATE-TIME)",
        example="search trace record -o traces -- torchrun --nproc-per-node 2 train.py",
        keeps=True,
    )
    record.add_argument(
        "--overhead", action="store_true", help="run it twice, first without recording, and compare their iterations"
    )
    record.add_argument("command", metavar="-- COMMAND", nargs="*", help="the command and its arguments, after --")
    read = trace.add(
        "import",
        "trace",
        "reads and checks traces of a job's ranks (Kineto, execution traces, Chakra, Horovod, BytePS, "
        "JSON lines of this package; plain, gz, tar, zip); -o writes them into one file, without it they are only "
        "checked",
        function="read",
        example="search trace import rank0.jsonl.gz rank1.jsonl.gz -o job.dfg",
        keeps=True,
    )
    read.add_argument("--whole", action="store_true", help="only iterations that all ranks have: of a job that died")
    read.add_argument("files", metavar="FILE", nargs="+", help="traces, any number of ranks in any order")
    show = trace.add("show", "trace", "what a file of `search trace import` holds", function="show")
    show.add_argument("file", metavar="DFG", help="a file of `search trace import -o`")
    align = trace.add(
        "align",
        "trace_align",
        "puts the clocks of all ranks on that of the first; tells each offset, what is feasible, whether it is known",
        example="search trace align job.dfg -o aligned.dfg",
        keeps=True,
    )
    align.add_argument("file", metavar="DFG", help="a file of `search trace import -o`")
    align.add_argument("--no-machines", action="store_true", help="ranks of one machine need not share its clock")
    align.add_argument("--solver", default="CLARABEL", metavar="NAME", help="of cvxpy (default: CLARABEL)")
    replay = trace.add(
        "replay",
        "trace_replay",
        "replays every iteration with its own seconds beside what it took; critical path, breakdown, stragglers",
        example="search trace replay aligned.dfg --trace job.json.gz",
    )
    replay.add_argument("file", metavar="DFG", help="a file of `search trace import -o` or `search trace align -o`")
    replay.add_argument("--trace", metavar="FILE", help="write the iteration that is shown as a Perfetto trace")
    replay.add_argument(
        "--what-if",
        dest="what_if",
        metavar="KEY=VALUE,…",
        help="predict it otherwise: bandwidth, compute (times as fast), latency_s, bucket_bytes, workers, topology "
        "(ring, tree, hierarchical, parameter_server), servers, per_machine, part_bytes, colocated, half_duplex, "
        "recompute",
    )
    replay.add_argument(
        "--alone",
        metavar="DFG2",
        help="of --what-if: the same job with nothing to synchronise: what transfers cost",
    )
    replay.add_argument(
        "--measured", action="store_true", help="look at an iteration as recorded; ranks may be missing"
    )
    replay.add_argument("--iteration", type=whole, metavar="N", help="of --measured (default: the median)")
    tune = trace.add(
        "tune",
        "trace_tune",
        "what to fuse, how to cut gradients and what to compute again, beside what others do by default on the same "
        "job; -o writes the plan that a trainer applies",
        example="search trace tune aligned.dfg -o plan.json; search trace tune bert_base --what-if workers=64",
    )
    tune.add_argument(
        "job",
        metavar="DFG",
        help="a file of `search trace import -o`, or a job of a model's size: bert_base, resnet50, vgg16, inception_v3",
    )
    tune.add_argument(
        "--memory-budget", type=number_such_as("16e9"), metavar="BYTES", help="of a worker: memory passes come first"
    )
    tune.add_argument("--driver", default="alg1", metavar="NAME", help="alg1 (default), mcmc or optuna")
    tune.add_argument(
        "--passes",
        metavar="NAME,…",
        help="op_fusion, tensor_fusion, tensor_partition, recomputation, gradient_accumulation (default: these), "
        "mixed_precision, and those of installed packages",
    )
    tune.add_argument("--without", metavar="NAME,…", help="passes to leave out")
    tune.add_argument(
        "--what-if",
        dest="what_if",
        metavar="KEY=VALUE,…",
        help="tune it for another cluster: bandwidth, compute, latency_s, workers, topology, servers, per_machine, "
        "part_bytes",
    )
    tune.add_argument(
        "--batch", type=positive, metavar="N", help="samples of a worker, of a model's size (default: 32)"
    )
    tune.add_argument("--fused", metavar="FILE", help="JSON with measured seconds of fused operations")
    tune.add_argument(
        "--launch-s",
        dest="launch_s",
        type=number_such_as("5e-6"),
        metavar="SECONDS",
        help="what fusing two measured operations saves where --fused does not tell (default: 5e-6)",
    )
    tune.add_argument("--plan", metavar="PLAN", help="what this plan comes to on the job, beside the others")
    tune.add_argument("--seed", type=whole, default=0, metavar="N", help="of mcmc and optuna (default: 0)")
    tune.add_argument("--no-coarse", action="store_true", help="search over every operation and tensor")
    tune.add_argument("--no-partial", action="store_true", help="judge every candidate by a full replay")
    tune.add_argument("--no-symmetry", action="store_true", help="replay every worker, and search every block")
    testbed = trace.add(
        "testbed",
        "trace_testbed",
        "trains a small model on ranks behind limited links of this machine (needs root), predicts it with other "
        "buckets, recomputation, servers and bandwidth, and runs it like that",
        example="search trace testbed --rate 400mbit --model cnn",
    )
    testbed.add_argument("--ranks", type=positive, default=2, metavar="N", help="ranks, one core each (default: 2)")
    testbed.add_argument("--rate", type=bits, default=1e9, metavar="RATE", help="of each link (default: 1gbit)")
    testbed.add_argument("--model", choices=("transformer", "cnn"), default="transformer", help="what is trained")
    testbed.add_argument(
        "--tune", action="store_true", help="run a tuner's plan against defaults, predict nothing else"
    )
    testbed.add_argument("--rounds", type=positive, default=3, metavar="N", help="medians are over (default: 3)")
    testbed.add_argument("--steps", type=positive, default=12, metavar="N", help="iterations of a run (default: 12)")
    testbed.add_argument("--keep", metavar="FOLDER", help="keep what was recorded there")
    diff = trace.add(
        "diff",
        "trace_diff",
        "two steps operation by operation, each measured (a file of trace import) or simulated (a configuration)",
        example="search trace diff job.dfg llama3_8b_small --reference fully_sharded",
    )
    diff.add_argument("a", metavar="A", help="a file of `search trace import -o`, a configuration or RUN:ID")
    diff.add_argument("b", metavar="B", help="the same")
    diff.add_argument("--reference", metavar="NAME", help="of a space: this of its references")
    diff.add_argument("--iteration", type=whole, metavar="N", help="of measured ones (default: the median)")
    diff.add_argument("--top", type=positive, default=20, metavar="N", help="operations to show (default: 20)")


def bits(text: str) -> float:
    """Bits a second as `tc` writes them: 1gbit, 400mbit.

    >>> bits("400mbit")
    400000000.0
    """
    number, factor = text, 1.0
    for unit, times in (("gbit", 1e9), ("mbit", 1e6), ("bit", 1.0)):
        if text.endswith(unit):
            number, factor = text.removesuffix(unit), times
            break
    try:
        found = float(number) * factor
    except ValueError:
        found = 0.0
    if not 1e6 <= found <= 1e11:
        raise argparse.ArgumentTypeError(f"must be 1mbit to 100gbit, such as 400mbit, but got {text!r}")
    return found
