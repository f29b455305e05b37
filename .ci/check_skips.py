"""Fails when a JUnit file of pytest holds no test that ran, or a skip that a fresh machine does not excuse.

Expected failures count as skips, as they do in the file: a known defect is no excuse.
"""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

EXCUSES = (r"\bGPU\b", r"\broot\b", r"\bquiet machine\b", r"\.\./shared is absent")


def main(path: str) -> int:
    """Prints every skip with its reason; 0 when each is excused and some test ran, else 1."""
    cases = list(ElementTree.parse(path).iter("testcase"))
    skips = [(case, skip.get("message") or "") for case in cases for skip in case.iter("skipped")]
    refused = 0
    for case, reason in skips:
        excused = any(re.search(pattern, reason) for pattern in EXCUSES)
        refused += not excused
        print(f"{'excused' if excused else 'REFUSED'}: {case.get('classname')}::{case.get('name')}: {reason}")
    num_ran = len(cases) - len(skips)
    print(f"{num_ran} tests ran, {len(skips)} were skipped, {refused} of them without an excuse")
    return 0 if num_ran and not refused else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
