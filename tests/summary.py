"""Count the tests that ran and those that were skipped: ``python tests/summary.py build/tests.xml``."""

import collections
import re
import sys
import xml.etree.ElementTree as ET


def summarise(path: str) -> str:
    """The counts of a JUnit report: a line per outcome, one per reason of a skip, most frequent first."""
    outcomes: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    for case in ET.parse(path).getroot().iter("testcase"):
        tags = {child.tag: child for child in case}
        outcome = next((tag for tag in ("failure", "error", "skipped") if tag in tags), "passed")
        if outcome == "skipped":
            outcome = "expected failure" if tags["skipped"].get("type") == "pytest.xfail" else "skipped"
            message = tags["skipped"].get("message") or "no reason given"
            # what differs between cases of one reason: shapes, addresses, counts
            reasons[re.sub(r"\d+", "#", message.splitlines()[0])] += 1
        outcomes[outcome] += 1
    total = sum(outcomes.values())
    ran = total - outcomes["skipped"]
    lines = [f"{total} tests: {ran} ran, {outcomes['skipped']} were skipped"]
    lines += [f"{count:>6} {outcome}" for outcome, count in outcomes.most_common()]
    if reasons:
        lines.append("skipped or expected to fail, because")
        lines += [f"{count:>6} x {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(summarise(sys.argv[1]))
