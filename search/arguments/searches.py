"""Commands that search, resume and list: launch, resume, runs."""

from __future__ import annotations

from search.arguments.parser import Commands, add_set, positive, whole

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds them, in the order of the help."""
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
    launch.add_argument("--trials", type=positive, metavar="N", help="structures that a sampler tries (1000)")
    launch.add_argument("--seconds", type=positive, metavar="S", help="of sampling, instead or at most")
    launch.add_argument("--seed", type=whole, help="of a sampler; stored with the run")
    launch.add_argument("--warm", metavar="RUN", help="a former run whose front a sampler tries first")
    add_set(launch)
    resume = commands.add("resume", "launch", "go on exactly where a run stopped", function="run_resume")
    resume.add_argument("run", metavar="RUN", help="a run folder, its name under runs/, or latest")
    for parser in (launch, resume):
        parser.add_argument("--pool", choices=("ray", "inline"), default="ray", help="inline: in this process")
        parser.add_argument("--workers", type=positive, metavar="N", help="default: one per core")
        parser.add_argument("--address", metavar="A", help="of a Ray cluster that runs already")
        parser.add_argument(
            "--replay",
            type=whole,
            default=3,
            metavar="K",
            help="finalists replayed beside the best and the named ones (default 3; 0: none at all)",
        )
        parser.add_argument(
            "--tune",
            action="store_true",
            help="refine the fastest finalists on their replayed steps: fused kernels, gradient buckets, pieces of "
            "overlapped traffic",
        )
    runs = commands.add("runs", "runs", "list runs, newest first")
    runs.add_argument("directory", nargs="?", default="runs", metavar="DIR", help="default: runs")
