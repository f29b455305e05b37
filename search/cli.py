"""The command line, `search COMMAND`: parses, calls the command's module, turns what goes wrong into an exit code.

0 done; 1 a defect of ours; 2 bad input; 3 nothing feasible; 130 interrupted. Only the chosen command's module is
loaded, so that help answers at once. Computes and prints nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

__all__ = ["main"]

DEFECT, BAD_INPUT, INTERRUPTED = 1, 2, 130
TRACEBACK = "SEARCH_TRACEBACK"

EPILOG = """\
start here:
  search launch spaces/deepseek_v3.yaml      every layout worth considering
  search show latest                         the front of the newest run
  search estimate latest:ID                  one of its points in full
exit codes: 0 done, 1 a defect of ours, 2 bad input, 3 nothing feasible, 130 interrupted (resumable)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    _open_streams()
    words = sys.argv[1:] if argv is None else list(argv)
    wants_traceback = "--traceback" in words or os.environ.get(TRACEBACK, "0") not in {"", "0"}
    try:
        code = _run(words)
        sys.stdout.flush()
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except (ValueError, OSError) as error:
        if wants_traceback:
            traceback.print_exc()
        return _say(_sentence(error), BAD_INPUT)
    except Exception as error:
        if wants_traceback:
            traceback.print_exc()
        hint = "" if wants_traceback else f"; run again with --traceback or {TRACEBACK}=1 and report what it prints"
        return _say(f"a defect of ours: {type(error).__name__}: {_sentence(error)}{hint}", DEFECT)
    return code


def _open_streams() -> None:
    """Gives a process that was started with closed streams (`>&-`) ones that lead nowhere.

    Otherwise the next file that is opened would get the number of the stream, and what is printed.
    """
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115 - lives as long as the process


def _run(words: Sequence[str]) -> int:
    parser = _parser()
    if not words:
        parser.print_help()
        return 0
    args = parser.parse_args(words)
    command = importlib.import_module(f"search.commands.{args.module}")
    code: int = getattr(command, args.function)(args)
    return code


def _sentence(error: BaseException) -> str:
    """The message on one line; of an operating system's refusal, what it says about which file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _say(text: str, code: int) -> int:
    with contextlib.suppress(OSError):  # where nobody can be told, the exit code is what is left
        print(f"search: {text}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage: a mistake takes one line here."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see `{self.prog} --help`")


class _Version(argparse.Action):
    """Looks the version up when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:  # noqa: ANN401 - argparse's own
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"trainspace {version('trainspace')}")
        except PackageNotFoundError:
            print("trainspace, not installed")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="search",
        description="Prices every way to lay a model's training over a cluster, and keeps those worth considering.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = _Commands(parser.add_subparsers(metavar="COMMAND", required=True))
    _add_search(commands)
    _add_results(commands)
    _add_points(commands)
    _add_facts(commands)
    return parser


class _Commands:
    """Adds commands that share --json, -o and --traceback."""

    def __init__(self, actions: Any) -> None:  # noqa: ANN401 - argparse keeps the type to itself
        self.actions = actions

    def add(self, name: str, module: str, text: str, *, function: str = "run", example: str = "") -> _Parser:
        parser: _Parser = self.actions.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example: {example}" if example else None,
            allow_abbrev=False,
        )
        parser.set_defaults(module=module, function=function)
        parser.add_argument("--json", action="store_true", help="plain JSON, SI units in the key names")
        parser.add_argument("-o", dest="output", metavar="FILE", help="write there instead of to standard output")
        parser.add_argument(
            "--traceback", action="store_true", default=argparse.SUPPRESS, help="show where an error came from"
        )
        return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but got {text!r}")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, but got {text!r}")
    return int(text)


def _number_such_as(example: str) -> Callable[[str], float]:
    """A reader of positive numbers whose refusals name one of the right size."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number such as {example}, but got {text!r}") from None
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be a positive number such as {example}, but got {text!r}")
        return value

    return read


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="strategy.tp=[1,2], repeatable",
    )


def _add_search(commands: _Commands) -> None:
    launch = commands.add(
        "launch",
        "launch",
        "run a search: every layout worth considering",
        example="search launch spaces/llama3_70b.yaml",
    )
    launch.add_argument("spaces", nargs="+", metavar="SPACE", help="space files, patterns, or names of shipped ones")
    launch.add_argument("--out", metavar="DIR", help="run folder, new or empty (default runs/NAME-TIMESTAMP)")
    launch.add_argument(
        "--sampler",
        choices=("auto", "exhaustive", "nsga2", "nsga3", "tpe", "gp", "random", "qmc"),
        help="how points are chosen; auto: the exact sweep where it can, else nsga2",
    )
    launch.add_argument("--trials", type=_positive, metavar="N", help="structures that a sampler tries (1000)")
    launch.add_argument("--seconds", type=_positive, metavar="S", help="of sampling, instead or at most")
    launch.add_argument("--seed", type=_whole, help="of a sampler; stored with the run")
    launch.add_argument("--warm", metavar="RUN", help="a former run whose front a sampler tries first")
    _add_set(launch)
    resume = commands.add("resume", "launch", "go on exactly where a run stopped", function="run_resume")
    resume.add_argument("run", metavar="RUN", help="a run folder, its name under runs/, or latest")
    for parser in (launch, resume):
        parser.add_argument("--pool", choices=("ray", "inline"), default="ray", help="inline: in this process")
        parser.add_argument("--workers", type=_positive, metavar="N", help="default: one per core")
        parser.add_argument("--address", metavar="A", help="of a Ray cluster that runs already")
        parser.add_argument(
            "--replay",
            type=_whole,
            default=3,
            metavar="K",
            help="finalists replayed beside the best and the named ones (default 3; 0: none at all)",
        )
    runs = commands.add("runs", "runs", "list runs, newest first")
    runs.add_argument("directory", nargs="?", default="runs", metavar="DIR", help="default: runs")


def _add_results(commands: _Commands) -> None:
    show = commands.add(
        "show", "show", "the front as a table", example="search show latest --where 'tp <= 4 and pp == 16' --top 5"
    )
    show.add_argument("run", metavar="RUN", help="a run folder, its name under runs/, or latest")
    show.add_argument("--top", type=_positive, metavar="N", help="at most N rows")
    show.add_argument("--exact", metavar="RUN", help="of a sampled run: hypervolume against this run's front")
    show.add_argument("--by", metavar="COLUMN", help="order by one column, best first")
    show.add_argument("--where", metavar="EXPR", help="rows for which an expression over the columns holds")
    show.add_argument("--csv", action="store_true", help="every column as CSV")
    show.add_argument(
        "--tables", choices=("front", "reference", "trials", "replays"), default="front", help="which rows"
    )
    show.add_argument("--picture", metavar="FILE", help="also draw the rows as a PNG (needs trainspace[report])")
    plan = commands.add(
        "plan",
        "plan",
        "days, GPU-hours, cost, energy and CO2 of a training run",
        example="search plan latest --tokens 14.8e12",
    )
    plan.add_argument("run", metavar="RUN", help="a run folder, its name under runs/, or latest")
    plan.add_argument("--tokens", type=_number_such_as("15e12"), required=True, metavar="N", help="tokens to train on")
    plan.add_argument("--days", type=_number_such_as("30"), metavar="D", help="only what ends within D days")
    plan.add_argument("--budget", type=_number_such_as("5e6"), metavar="USD", help="only what costs at most so much")
    plan.add_argument("--top", type=_positive, metavar="N", help="at most N rows")


def _add_points(commands: _Commands) -> None:
    estimate = commands.add(
        "estimate",
        "estimate",
        "one configuration in full: where its time and its memory go",
        example="search estimate spaces/deepseek_v3.yaml --reference published --ops",
    )
    estimate.add_argument("config", metavar="CONFIG", help="a space file with one point, FILE:NAME, or RUN:ID")
    estimate.add_argument("--reference", metavar="NAME", help="the named point of the file")
    estimate.add_argument("--ops", action="store_true", help="every operation with its price")
    compare = commands.add(
        "compare",
        "compare",
        "two configurations: where their time and their memory go apart",
        example="search compare deepseek_v3:published deepseek_v3:published --set-b strategy.layout=auto",
    )
    for letter in ("a", "b"):
        compare.add_argument(letter, metavar=letter.upper(), help="a space file with one point, FILE:NAME, or RUN:ID")
        compare.add_argument(
            f"--set-{letter}", dest=f"overrides_{letter}", metavar="KEY=VALUE", action="append", default=[],
            help=f"for {letter.upper()} alone, repeatable",
        )  # fmt: skip
    schedules = commands.add(
        "schedules",
        "schedules",
        "every pipeline schedule for one configuration, side by side at equal memory",
        example="search schedules deepseek_v3:published -o schedules.png",
    )
    schedules.add_argument("config", metavar="CONFIG", help="a space file with one point, FILE:NAME, or RUN:ID")
    schedules.add_argument("--reference", metavar="NAME", help="the named point of the file")
    memory = "of a chip; default: what its HBM leaves"
    schedules.add_argument("--memory", type=_number_such_as("80"), metavar="GB", help=memory)
    why = commands.add("why", "why", "what rejected candidates, and what would make the closest ones fit")
    why.add_argument("target", metavar="RUN|CONFIG", help="a run, a space file, or RUN:ID")
    why.add_argument("--reference", metavar="NAME", help="the named point of the file")
    replay = commands.add(
        "replay",
        "replay",
        "the finalists of a run, or one configuration, replayed operation by operation",
        example="search replay latest --trace traces",
    )
    replay.add_argument("config", metavar="RUN|CONFIG", help="a run, RUN:ID, or a space file with one point")
    replay.add_argument("--reference", metavar="NAME", help="the named point of the file")
    replay.add_argument(
        "--top", type=_whole, metavar="K", help="finalists beside the marked and named ones (default 3)"
    )
    replay.add_argument("--trace", metavar="DIR", help="traces for ui.perfetto.dev go there (default: into the run)")
    replay.add_argument("--no-trace", action="store_true", help="write no traces")
    for parser in (estimate, compare, schedules, why, replay):
        _add_set(parser)


def _add_facts(commands: _Commands) -> None:
    capture = commands.add(
        "capture",
        "capture",
        "the graph of a Hugging Face model, captured from its own code without weights",
        example="search capture config.json -o model.graph.json",
    )
    capture.add_argument("config", metavar="CONFIG_JSON", help="a Hugging Face config.json, or its folder")
    capture.add_argument("--phase", choices=("train", "prefill", "decode"), default="train", help="default: train")
    capture.add_argument("--layers", type=_positive, metavar="N", help="the first N layers only")
    capture.add_argument("--allow-unknown", action="store_true", help="price unknown operations as memory-bound")
    capture.add_argument("--trust-remote-code", action="store_true", help="run code that lies beside the config")
    validate = commands.add("validate", "validate", "predicted against measured training steps")
    columns = "columns: search/measured.py; default: the published ones in tests/anchors/ of a checkout"
    validate.add_argument("tables", nargs="*", metavar="CSV", help=f"steps that you measured; {columns}")
    validate.add_argument(
        "--cross-validate",
        choices=("none", "group", "family"),
        default="none",
        help="predict each row with shared parameters fitted without its model on that chip, or without its family",
    )
    validate.add_argument(
        "--bands", metavar="FILE", help="with --cross-validate group: P10 and P90 by cell, as the package ships them"
    )
    validate.add_argument("--html", metavar="FILE", help="also a page with pictures, which must not exist yet")
    catalog = commands.add(
        "catalog", "catalog", "what is known by name, with sources", example="search catalog chips h800-80g-sxm"
    )
    catalog.add_argument("kind", choices=("chips", "clusters", "software", "models", "spaces"), help="what to list")
    catalog.add_argument("name", nargs="?", metavar="NAME", help="one of them in full")
    calibrate = commands.add(
        "calibrate",
        "calibrate",
        "a chip's and a link's curves from tables of measured operators",
        example="search calibrate gemm_h100.csv.gz attention_h100.csv.gz --name mine -o mine.yaml",
    )
    calibrate.add_argument(
        "tables",
        nargs="*",
        metavar="TABLE",
        help="CSV, plain or gzipped (docs/hardware.md), or a folder of search measure (default: measured)",
    )
    calibrate.add_argument("--chip", metavar="CHIP", help="whose tables these are, where they do not say")
    calibrate.add_argument("--name", metavar="NAME", help="of the system that -o writes; also allows unknown devices")
    measure = commands.add(
        "measure",
        "measure",
        "operators and collectives of this machine's device, for search calibrate; or a training step against its "
        "prediction",
        example="search measure --seconds 120, then search calibrate --name mine -o mine.yaml, then search measure "
        "--check mine.yaml",
    )
    measure.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA, else the CPU")
    measure.add_argument(
        "--seconds",
        type=_number_such_as("120"),
        default=120.0,
        metavar="S",
        help="at most, told before it starts (120)",
    )
    measure.add_argument("--out", metavar="DIR", help="folder of tables, new or empty (default: measured)")
    measure.add_argument(
        "--ranks", type=_positive, metavar="N", help="processes that train together here (each GPU one; a CPU 1)"
    )
    measure.add_argument(
        "--dtype",
        dest="dtypes",
        action="append",
        choices=("fp32", "bf16", "fp16"),
        help="of products, repeatable; attention and streams take the first (CUDA: bf16, CPU: fp32)",
    )
    measure.add_argument(
        "--check", metavar="SYSTEM", help="run small training steps and compare with what this system predicts"
    )
    bench = commands.add("bench", "bench", "how fast all this is on this machine")
    bench.add_argument("--only", metavar="PATTERN", default="*", help="cases whose name matches, such as 'evaluate*'")
