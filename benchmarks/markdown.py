"""Tables for the pages in docs/."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, figures: bool = False
) -> str:
    """A table; with `figures` all columns but the first are set to the right."""
    rule = "|---" + ("|---:" if figures else "|---") * (len(head) - 1) + "|"
    first, *rest = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return "\n".join([first, rule, *rest])
