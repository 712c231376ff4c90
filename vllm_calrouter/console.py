"""What the subcommands share on a terminal: errors, progress, pairs in options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Wrong(click.ClickException):
    """One line on stderr, exit code 2."""

    exit_code = 2

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).split()))
        context = click.get_current_context(silent=True)
        self._command = "" if context is None else f" {context.info_name}"

    def show(self, file: Any = None) -> None:
        click.echo(f"calrouter{self._command}: error: {self.message}", err=True)


def several(options: Sequence[Decorator]) -> Decorator:
    """One decorator that adds all of these click options, in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def seed_option(of: str) -> Decorator:
    """`--seed`, several times; `of`: whose, in its help."""
    return click.option(
        "--seed",
        "seeds",
        multiple=True,
        type=click.IntRange(0, 2**31 - 1),
        default=(1,),
        show_default=True,
        help=f"Of {of}. May be given several times.",
    )


def find_rate_option(whose: str) -> Decorator:
    """`--find-rate`; `whose` goodput the rate is found for."""
    return click.option(
        "--find-rate",
        type=click.FloatRange(0, 1, min_open=True, max_open=True),
        metavar="GOODPUT",
        help=f"First find the rate at which the first {whose}, with the first seed, "
        "has this goodput (0.7, say: in mid-collapse); then run all at that rate.",
    )


def json_option(line: str) -> Decorator:
    """`--json`; what each line of it is of."""
    return click.option(
        "--json", "as_json", is_flag=True, help=f"Figures as JSON, a line a {line}."
    )


def pair(text: str, option: str, example: str) -> tuple[str, str]:
    """The two sides of `KEY=VALUE`; raises ValueError that shows an example."""
    key, sign, value = text.partition("=")
    if not (key and sign and value):
        raise ValueError(f"{option} {text!r}: write {option} {example}")
    return key.strip(), value.strip()


def number(text: str, where: str) -> float:
    """A number; raises ValueError that says where it was looked for."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{where}: {text!r} is no number") from None


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where there is somebody to look at it; told what is done."""
    from tqdm import tqdm

    with tqdm(
        total=total,
        desc=title,
        unit="req",
        file=sys.stderr,
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:

        def tell(done: int) -> None:
            bar.update(done - bar.n)

        yield tell
