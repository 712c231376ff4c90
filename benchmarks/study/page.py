"""docs/study.md: the exhibits' tables and plots, and what they say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.study import tables
from benchmarks.study.exhibit import Results
from benchmarks.study.plots import draw

#: What agrees, what does not and why, by exhibit; written by hand, with no figures of
#: runs in it. `intro.md` opens the page.
_READINGS = Path(__file__).parent / "readings"


def write(exhibits: Sequence[Results], folder: Path) -> Path:
    """Write `study.md` and its plots into a folder; returns the page."""
    plots = folder / "study"
    plots.mkdir(parents=True, exist_ok=True)
    parts = [reading("intro")]
    for results in exhibits:
        parts += section(results, plots)
    page = folder / "study.md"
    page.write_text("\n\n".join(parts) + "\n")
    return page


def reading(name: str) -> str:
    """What is said of an exhibit."""
    return (_READINGS / f"{name}.md").read_text().strip()


def section(results: Results, plots: Path) -> Iterator[str]:
    """The parts of an exhibit's section; its plots are drawn on the way."""
    exhibit = results.exhibit
    yield f"## {exhibit.title}"
    yield exhibit.about
    yield tables.goodput(results)
    yield tables.tails(results)
    for name in exhibit.tables:
        yield tables.MORE[name](results)
    if exhibit.printed:
        yield tables.printed(results)
    if exhibit.claims:
        yield tables.claims(results)
    for name in exhibit.plots:
        file = draw(results, name, plots)
        yield f"![{exhibit.title}: {name}]({plots.name}/{file.name})"
    yield reading(exhibit.name)
    seeds = ", ".join(map(str, results.seeds))
    yield (
        f"`make study`, or `python -m benchmarks.study --only {exhibit.name}`; seeds "
        f"{seeds}. One of its runs:"
    )
    yield f"```\ncalrouter simulate {results.first_line()}\n```"
