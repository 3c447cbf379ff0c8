"""Write the tables of recorded results into the pages that show them.

    python -m benchmarks tables            # after a recording has changed
    python -m benchmarks tables --check    # name page and table where they differ

A page names a table by a comment, ``<!-- table: NAME -->``; the rows below it are written here.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.options import RESULTS
from benchmarks.tables import recall, speed, text
from flexnsa.files import write_whole

TABLES = recall.TABLES | speed.TABLES | text.TABLES
"""What returns the rows of a table, its header first, by name."""
PAGES = [Path("README.md"), *sorted(Path("docs").glob("*.md")), *sorted(RESULTS.glob("*.md"))]
MARKED = re.compile(r"^<!-- table: (?P<name>.+) -->\n(?P<rows>(\|.*\n)*)", re.MULTILINE)


def fill(text: str) -> tuple[str, list[str]]:
    """Return a page with its tables as they are recorded, and the names of those that were not."""
    stale = []

    def write(marked: re.Match[str]) -> str:
        if marked["name"] not in TABLES:
            raise ValueError(f"table: expected one of {', '.join(TABLES)}, got {marked['name']!r}")
        rows = markdown(TABLES[marked["name"]]())
        if rows != marked["rows"]:
            stale.append(marked["name"])
        return f"<!-- table: {marked['name']} -->\n{rows}"

    return MARKED.sub(write, text), stale


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of GitHub's Markdown, the first row its header."""
    header, *body = ["|".join(["", *(f" {cell} " if cell else " " for cell in row), ""]) + "\n" for row in rows]
    return "".join([header, "|" + "---|" * len(rows[0]) + "\n", *body])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with status 1 if a table differs")
    arguments = parser.parse_args(argv)
    differ = []
    for page in PAGES:
        text, stale = fill(page.read_text())
        differ += [f"{page}: {name}" for name in stale]
        if stale and not arguments.check:
            write_whole(page, text)
    if differ and arguments.check:
        raise SystemExit("\n".join([*differ, "These tables are not what was recorded: make tables writes them."]))
    print("\n".join(differ) or "All tables are what was recorded.")


if __name__ == "__main__":
    main()
