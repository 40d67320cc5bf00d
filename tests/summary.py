"""Count the tests that ran and those that were skipped: ``python tests/summary.py build/tests.xml``.

A skip that nothing on this machine explains is an error: see tests/skips.py.
"""

import collections
import re
import sys
import xml.etree.ElementTree as ET

import skips

SLOWEST, SECONDS = 20, 5  # how many tests are listed by what they take, from how long on


def summarise(path: str) -> tuple[str, int]:
    """The counts of a JUnit report: a line per outcome, one per reason of a skip, most frequent first.

    And how many skips are out of order.
    """
    slow: list[tuple[float, str]] = []
    outcomes: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    lost: collections.Counter[str] = collections.Counter()
    for case in ET.parse(path).getroot().iter("testcase"):
        tags = {child.tag: child for child in case}
        slow.append((float(case.get("time") or 0), f"{case.get('classname')}::{case.get('name')}"))
        outcome = next((tag for tag in ("failure", "error", "skipped") if tag in tags), "passed")
        if outcome == "skipped":
            outcome = "expected failure" if tags["skipped"].get("type") == "pytest.xfail" else "skipped"
            message = _reason(tags["skipped"])
            # what differs between cases of one reason: shapes, addresses, counts
            reason = re.sub(r"\d+", "#", message.splitlines()[0])
            reasons[reason] += 1
            lost[reason] += outcome == "skipped" and skips.out_of_order(message)
        outcomes[outcome] += 1
    total = sum(outcomes.values())
    ran = total - outcomes["skipped"]
    lines = [f"{total} tests: {ran} ran, {outcomes['skipped']} were skipped"]
    lines += [f"{count:>6} {outcome}" for outcome, count in outcomes.most_common()]
    if reasons:
        lines.append("skipped or expected to fail, because")
        lines += [f"{count:>6} x {reason}" for reason, count in reasons.most_common()]
    if slowest := [x for x in sorted(slow, reverse=True)[:SLOWEST] if x[0] >= SECONDS]:
        lines.append(f"the slowest, of {sum(seconds for seconds, _ in slow):.0f} s in all")
        lines += [f"{seconds:>6.0f} s {name}" for seconds, name in slowest]
    if lost.total():
        lines.append("skipped, and nothing on this machine explains it (tests/skips.py)")
        lines += [f"{count:>6} x {reason}" for reason, count in lost.most_common() if count]
    return "\n".join(lines), lost.total()


def _reason(skipped: ET.Element) -> str:
    """Why; of a whole file the message says only that, and its text is pytest's tuple of place and reason."""
    whole = re.search(r"Skipped: (.*)['\"]\)$", skipped.text or "", re.DOTALL)
    message = whole[1] if skipped.get("message") == "collection skipped" and whole else skipped.get("message")
    return message or "no reason given"


if __name__ == "__main__":
    text, lost = summarise(sys.argv[1])
    print(text)
    sys.exit(1 if lost else 0)
