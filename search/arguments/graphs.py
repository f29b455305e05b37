"""Commands about captured graphs: capture."""

from __future__ import annotations

from search.arguments.parser import Commands, positive

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds them, in the order of the help."""
    capture = commands.add(
        "capture",
        "capture",
        "the graph of a Hugging Face model, captured from its own code without weights",
        example="search capture config.json -o model.graph.json",
    )
    capture.add_argument("config", metavar="CONFIG_JSON", help="a Hugging Face config.json, or its folder")
    capture.add_argument("--phase", choices=("train", "prefill", "decode"), default="train", help="default: train")
    capture.add_argument("--layers", type=positive, metavar="N", help="the first N layers only")
    capture.add_argument("--allow-unknown", action="store_true", help="price unknown operations as memory-bound")
    capture.add_argument("--trust-remote-code", action="store_true", help="run code that lies beside the config")
