"""Writes what a benchmark found into docs/benchmarks.md, between the markers of its name."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from twinpool.lab.machine import describe_machine

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"


def write_section(name: str, text: str) -> None:
    """Put ``text`` in place of what stands between ``<!-- name -->`` and ``<!-- end of name -->``.

    Raises:
        SystemExit: The document has no such markers.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    document = DOCUMENT.read_text(encoding="utf-8")
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise SystemExit(f"{DOCUMENT} has no place for {name}")
    DOCUMENT.write_text(f"{before}{begin}{text}\n{end}{after}", encoding="utf-8")


def provenance(module: str) -> str:
    """Say by which command, where and when the numbers below were made."""
    machine = describe_machine()
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    return (
        f"`{command}`, {machine['date'][:10]}: {machine['processor']}, {machine['cores']} cores, load "
        f"{machine['load']:.1f} when it ended; {machine['system']}, Python {machine['python']}, {versions}."
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; numbers stand at the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))
