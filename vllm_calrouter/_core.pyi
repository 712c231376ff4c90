import enum

class Phase(enum.IntEnum):
    PREFILL = 0
    DECODE = 1

class Table:
    """What one router has booked on each engine, and what engines reported.

    Ranks out of range raise IndexError.
    """

    def __init__(self, engines: int) -> None:
        """Raises ValueError when `engines` is 0."""

    @property
    def engines(self) -> int: ...
    def book(
        self, rank: int, phase: Phase, prompt_tokens: int, output_tokens: int
    ) -> int:
        """Book one leg; returns its number, which starts at 1 and only grows."""

    def release(self, booking: int) -> bool:
        """End a booking; False when it is unknown or was released before."""

    def report(self, rank: int, waiting: int, running: int, kv_usage: float) -> None:
        """Take over an engine's own report: requests, requests, fraction of blocks."""

    def legs(self, rank: int, phase: Phase) -> int:
        """Open bookings of one phase."""

    def in_flight(self, rank: int) -> int:
        """Open bookings of both phases."""

    def prompt_tokens(self, rank: int) -> int: ...
    def output_tokens(self, rank: int) -> int: ...
    def open_bookings(self) -> int: ...
    def is_idle(self) -> bool:
        """No booking is open and every counter is exactly zero."""

class Policy:
    """Picks one of the ranks [begin, end); made by `make_policy`."""

    @property
    def name(self) -> str: ...
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    def pick(self, table: Table, prompt_tokens: int, output_tokens: int) -> int:
        """A rank for a request of this size (output predicted).

        Raises IndexError when the pool exceeds the table.
        """

    def scores(self) -> list[tuple[int, float]]:
        """Candidates of the last pick as looked at; lower is better."""

    def reason(self) -> str:
        """Why the last pick fell as it did."""

def make_policy(
    name: str,
    begin: int,
    end: int,
    *,
    start: int = 0,
    routers: int = 1,
    seed: int = 0,
    threshold_tokens: int = 512,
    long_share: float = 0.5,
) -> Policy:
    """A policy over the ranks [begin, end).

    Args:
        name: one of `POLICIES`.
        begin, end: the pool.
        start: offset in the pool at which turns begin.
        routers: how many routers share the engines.
        seed: of `power_of_two`'s draws.
        threshold_tokens, long_share: of `length_threshold`.

    Raises ValueError: unknown name, empty pool, share outside (0, 1].
    """

POLICIES: tuple[str, ...]
