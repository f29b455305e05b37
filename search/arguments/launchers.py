"""Commands about launch files of training frameworks: import, export."""

from __future__ import annotations

from search.arguments.parser import Commands, add_set, positive

__all__ = ["add"]

FRAMEWORKS = ("megatron-lm", "megatron-bridge", "torchtitan", "deepspeed")


def add(commands: Commands) -> None:
    """Adds them, in the order of the help."""
    reader = commands.add(
        "import",
        "import_",
        "a launch file as a configuration: Megatron-LM, Megatron-Bridge, NeMo, TorchTitan, DeepSpeed",
        example="search import pretrain.sh --system dgx_h100 -o mine.yaml",
    )
    reader.add_argument("file", metavar="FILE", help="a script, YAML, TOML or JSON; recognised by its content")
    reader.add_argument("--system", metavar="NAME", help="the cluster it runs on, or a system's YAML file")
    reader.add_argument("--gpus", type=positive, metavar="N", help="how many, where the file does not say")
    reader.add_argument("--model", metavar="NAME", help="the model, in place of sizes in the file")
    reader.add_argument("--args", dest="launch", metavar="FILE", help="launch arguments of a DeepSpeed JSON")
    reader.add_argument(
        "--define", metavar="NAME=VALUE", action="append", default=[], help="a variable of the script, repeatable"
    )
    reader.add_argument("--against", metavar="RUN", help="price it, and what the best of a run would change; or RUN:ID")
    writer = commands.add(
        "export",
        "export",
        "a configuration as a launch file, with a note for what the framework cannot say",
        example="search export latest:ID --to megatron-lm -o pretrain.sh",
    )
    writer.add_argument(
        "config", metavar="RUN:ID|CONFIG", help="a row of a run, a space file with one point, FILE:NAME"
    )
    writer.add_argument("--to", required=True, choices=FRAMEWORKS, metavar="FRAMEWORK", help=", ".join(FRAMEWORKS))
    writer.add_argument("--reference", metavar="NAME", help="the named point of the file")
    for parser in (reader, writer):
        add_set(parser)
