"""Commands about what is known and measured: validate, catalog, calibrate, measure, bench."""

from __future__ import annotations

from search.arguments.parser import Commands, number_such_as, positive

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds them, in the order of the help."""
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
        keeps=True,
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
        type=number_such_as("120"),
        default=120.0,
        metavar="S",
        help="at most, told before it starts (120)",
    )
    measure.add_argument("--out", metavar="DIR", help="folder of tables, new or empty (default: measured)")
    measure.add_argument(
        "--ranks", type=positive, metavar="N", help="processes that train together here (each GPU one; a CPU 1)"
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
