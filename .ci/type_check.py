"""The type checker, strictly, over the package: `python .ci/type_check.py`, in an environment with the extra [dev].

Rooms, that is files and folders of `hetu/`, have as many complaints as `type_check.txt` says; those that it does not
name have none. The numbers may only fall: more is an error, and so is less until the number is lowered.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALLOWED = Path(__file__).with_suffix(".txt")


def rooms(report: str) -> Counter[str]:
    """The complaints of mypy by room."""
    return Counter(re.findall(r"^(hetu/[^/:]+|tests/[^:]+)[^:\n]*:\d+: error:", report, re.M))


def verdicts(found: Counter[str], allowed: dict[str, int]) -> list[str]:
    """What is wrong, a line per room."""
    wrong = []
    for room in sorted(found | Counter(allowed)):
        now, most = found[room], allowed.get(room, 0)
        if now > most:
            wrong.append(f"{room}: {now} complaints about types, at most {most} are allowed")
        elif now < most:
            wrong.append(f"{room}: {now} complaints about types are left: lower the {most} in {ALLOWED.name}")
    return wrong


def main() -> int:
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode > 1 or done.stderr:
        print(done.stdout, done.stderr)
        return 2
    lines = [line.split() for line in ALLOWED.read_text("utf-8").splitlines()]
    found = rooms(done.stdout)
    wrong = verdicts(found, {room: int(most) for room, most in lines})
    worse = [line.split(":")[0] for line in wrong if "at most" in line]
    print(*(line for line in done.stdout.splitlines() if line.startswith(tuple(worse))), *wrong, sep="\n")
    print(f"{found.total()} complaints, in {len(found)} rooms")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
