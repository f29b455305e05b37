"""Renews the ceilings of the anchors to today's errors: `python -m tests.anchors.renew`.

Lower ceilings are written at once. Higher ones are refused, and told, unless `--raise` says that this change of the
model is worth them; the commit then says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from tests.anchors.anchors import CEILINGS, ceiling_of, ceilings, errors, write_ceilings

Percents = Mapping[tuple[str, str], int]


def main(words: Sequence[str] | None = None) -> int:
    """0 when ceilings are renewed, 1 when some would have to rise."""
    parser = argparse.ArgumentParser(prog="python -m tests.anchors.renew", description=__doc__.partition("\n")[0])
    parser.add_argument("--raise", dest="may_rise", action="store_true", help="let ceilings rise, too")
    may_rise = parser.parse_args(words).may_rise
    old = ceilings() if CEILINGS.exists() else {}
    new = {key: ceiling_of(error) for key, error in errors().items()}
    higher = [key for key in new if key in old and new[key] > old[key]]
    lower = [key for key in new if key in old and new[key] < old[key]]
    for key in higher:
        print(f"{key[0]}, {key[1]}: {old[key]} -> {new[key]} %", file=sys.stderr)
    if higher and not may_rise:
        print(f"{len(higher)} ceilings would rise; nothing is written: mend the model, or add --raise", file=sys.stderr)
        return 1
    write_ceilings(new)
    times = [percent for (_, kind), percent in new.items() if kind == "step_time"]
    print(
        f"{len(new)} ceilings: {len(lower)} fell, {len(higher)} rose; step times {sum(times) / len(times):.1f} % mean"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
