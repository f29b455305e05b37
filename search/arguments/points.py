"""Commands about one configuration or two: estimate, compare, schedules, why, replay."""

from __future__ import annotations

from search.arguments.parser import Commands, add_set, number_such_as, whole

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds them, in the order of the help."""
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
    schedules.add_argument("--memory", type=number_such_as("80"), metavar="GB", help=memory)
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
    replay.add_argument("--top", type=whole, metavar="K", help="finalists beside the marked and named ones (default 3)")
    replay.add_argument("--trace", metavar="DIR", help="traces for ui.perfetto.dev go there (default: into the run)")
    replay.add_argument("--no-trace", action="store_true", help="write no traces")
    replay.add_argument(
        "--tune",
        action="store_true",
        help="refine the fastest on its replayed step: fused kernels, gradient buckets, pieces of overlapped traffic",
    )
    for parser in (estimate, compare, schedules, why, replay):
        add_set(parser)
