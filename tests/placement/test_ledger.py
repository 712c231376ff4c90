"""The ledger against a cluster where everything happens at the wrong moment."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from vllm_calrouter._core import Phase, Table

PHASES = (Phase.PREFILL, Phase.DECODE)
_FIGURES = (
    *("incarnation", "sequence", "booking_seen", "now_s"),
    *("prefill_tokens", "output_tokens", "context_tokens"),
    *("running", "waiting", "waiting_remote"),
    *("kv_total_blocks", "kv_free_blocks", "kv_pinned_blocks", "block_tokens"),
)
_ROUTERS = 2
_ENGINES = 2


def message(**figures: Any) -> dict[str, Any]:
    """A message's arguments; what is not given is 0."""
    return {**dict.fromkeys(_FIGURES, 0), **figures}


@dataclass(frozen=True)
class Leg:
    router: int
    uid: int
    number: int
    rank: int
    phase: Phase
    prompt_tokens: int
    output_tokens: int


@dataclass
class Engine:
    """Has legs, and echoes the highest number it accepted of each router life."""

    incarnation: int
    legs: list[Leg] = field(default_factory=list)
    accepted: set[Leg] = field(default_factory=set)
    echo: dict[int, int] = field(default_factory=dict)
    sequence: int = 0


@dataclass
class Router:
    uid: int
    table: Table = field(default_factory=lambda: Table(_ENGINES))
    open: dict[int, Leg] = field(default_factory=dict)
    #: By rank: the last message that was taken in.
    heard: dict[int, dict[str, Any]] = field(default_factory=dict)


def sums(legs: Iterable[Leg]) -> dict[str, tuple[int, ...]]:
    chosen = list(legs)
    by_phase = [[leg for leg in chosen if leg.phase == phase] for phase in PHASES]
    return {
        "legs": tuple(len(part) for part in by_phase),
        "prompt_tokens": tuple(sum(x.prompt_tokens for x in part) for part in by_phase),
        "output_tokens": tuple(sum(x.output_tokens for x in part) for part in by_phase),
    }


class Cluster(RuleBasedStateMachine):
    """Routers book; engines accept, end, restart; messages are late, lost, doubled."""

    @initialize()
    def start(self) -> None:
        self.numbers = itertools.count(1)
        self.engines = [Engine(next(self.numbers)) for _ in range(_ENGINES)]
        self.routers = [Router(next(self.numbers)) for _ in range(_ROUTERS)]
        # Legs to one engine arrive in the order in which a router booked them.
        self.on_the_way: dict[tuple[int, int], deque[Leg]] = {}
        self.messages: list[tuple[int, int, dict[str, Any]]] = []

    ranks = st.integers(0, _ENGINES - 1)
    indices = st.integers(0, _ROUTERS - 1)
    tokens = st.integers(0, 2**32 - 1)

    @rule(
        index=indices,
        rank=ranks,
        phase=st.sampled_from(PHASES),
        prompt=tokens,
        out=tokens,
    )
    def book(self, index: int, rank: int, phase: Phase, prompt: int, out: int) -> None:
        router = self.routers[index]
        number = router.table.book(rank, phase, prompt, out)
        assert number not in router.open
        assert number > max(router.open, default=0)
        leg = Leg(index, router.uid, number, rank, phase, prompt, out)
        router.open[number] = leg
        self.on_the_way.setdefault((router.uid, rank), deque()).append(leg)

    @precondition(lambda self: any(self.on_the_way.values()))
    @rule(draw=st.data())
    def arrive(self, draw: st.DataObject) -> None:
        ways = [way for way in self.on_the_way.values() if way]
        leg = draw.draw(st.sampled_from(ways)).popleft()
        engine = self.engines[leg.rank]
        engine.legs.append(leg)
        engine.accepted.add(leg)
        engine.echo[leg.uid] = leg.number

    @precondition(lambda self: any(engine.legs for engine in self.engines))
    @rule(draw=st.data())
    def finish(self, draw: st.DataObject) -> None:
        engine = draw.draw(st.sampled_from([e for e in self.engines if e.legs]))
        leg = engine.legs.pop(draw.draw(st.integers(0, len(engine.legs) - 1)))
        self._release(leg)

    def _release(self, leg: Leg) -> None:
        router = self.routers[leg.router]
        if router.uid == leg.uid:
            mine = router.open.pop(leg.number, None)
            assert router.table.release(leg.number) == (mine is not None)
        # Noticed twice, or by a router that is a new one: counts for nothing.
        if router.uid == leg.uid or leg.number not in router.open:
            assert not router.table.release(leg.number)

    @precondition(lambda self: any(router.open for router in self.routers))
    @rule(draw=st.data())
    def abort(self, draw: st.DataObject) -> None:
        """The client leaves: released at once, wherever its leg is."""
        router = draw.draw(st.sampled_from([r for r in self.routers if r.open]))
        number = draw.draw(st.sampled_from(sorted(router.open)))
        del router.open[number]
        assert router.table.release(number)

    @rule(rank=ranks)
    def tell(self, rank: int) -> None:
        engine = self.engines[rank]
        engine.sequence += 1
        for index, router in enumerate(self.routers):
            figures = message(
                incarnation=engine.incarnation,
                sequence=engine.sequence,
                booking_seen=engine.echo.get(router.uid, 0),
                running=len(engine.legs),
                output_tokens=sum(leg.output_tokens for leg in engine.legs),
            )
            self.messages.append((index, rank, figures))

    @precondition(lambda self: self.messages)
    @rule(draw=st.data(), again=st.booleans())
    def hear(self, draw: st.DataObject, again: bool) -> None:
        """Messages come in any order, some twice, and to a router's next life."""
        place = draw.draw(st.integers(0, len(self.messages) - 1))
        index, rank, figures = self.messages[place]
        if not again:
            del self.messages[place]
        router = self.routers[index]
        last = router.heard.get(rank)
        taken = router.table.hear(rank, **figures)
        if last and last["incarnation"] == figures["incarnation"]:
            assert taken == (figures["sequence"] > last["sequence"])
        if taken:
            router.heard[rank] = figures

    @precondition(lambda self: self.messages)
    @rule(draw=st.data())
    def lose(self, draw: st.DataObject) -> None:
        del self.messages[draw.draw(st.integers(0, len(self.messages) - 1))]

    @rule(rank=ranks)
    def engine_restarts(self, rank: int) -> None:
        """Its legs are lost; the routers have not noticed yet."""
        self.engines[rank] = Engine(next(self.numbers))

    @rule(index=indices)
    def router_restarts(self, index: int) -> None:
        """It forgets everything; what it sent is still under way."""
        # Messages carry what is for the old life's id; nobody reads those any more.
        self.messages = [entry for entry in self.messages if entry[0] != index]
        self.routers[index] = Router(next(self.numbers))

    @invariant()
    def unseen_is_what_the_last_message_lacks(self) -> None:
        for router in getattr(self, "routers", ()):
            for rank in range(_ENGINES):
                echo = router.heard.get(rank, {}).get("booking_seen", 0)
                lacking = [
                    leg
                    for leg in router.open.values()
                    if leg.rank == rank and leg.number > echo
                ]
                assert router.table.unseen(rank) == sums(lacking)

    @rule(index=indices, rank=ranks)
    def a_fresh_message_counts_every_leg_once(self, index: int, rank: int) -> None:
        router, engine = self.routers[index], self.engines[rank]
        engine.sequence += 1
        figures = message(
            incarnation=engine.incarnation,
            sequence=engine.sequence,
            booking_seen=engine.echo.get(router.uid, 0),
            running=len(engine.legs),
        )
        assert router.table.hear(rank, **figures)
        router.heard[rank] = figures
        echo = figures["booking_seen"]
        on_the_way = set(self.on_the_way.get((router.uid, rank), ()))
        counted = 0
        for leg in router.open.values():
            if leg.rank != rank:
                continue
            in_figures, on_way = leg in engine.accepted, leg in on_the_way
            assert not (in_figures and on_way)
            lost = not in_figures and not on_way
            counted += on_way or (lost and leg.number > echo)
        assert sum(router.table.unseen(rank)["legs"]) == counted

    def teardown(self) -> None:
        for router in getattr(self, "routers", ()):
            assert router.table.open_bookings() == len(router.open)
            assert router.table.is_idle() == (not router.open)
            for number in list(router.open):
                assert router.table.release(number)
            assert router.table.is_idle()
            for rank in range(_ENGINES):
                assert router.table.unseen(rank) == sums([])
                assert router.table.in_flight(rank) == 0


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_what_a_restarted_engine_lost_is_unseen_until_it_is_released() -> None:
    table = Table(1)
    numbers = [table.book(0, Phase.DECODE, 100, 50) for _ in range(3)]
    table.hear(0, **message(incarnation=1, sequence=5, booking_seen=numbers[1]))
    assert table.unseen(0)["legs"] == (0, 1)
    table.hear(0, **message(incarnation=2, sequence=1))
    assert table.unseen(0) == {
        "legs": (0, 3),
        "prompt_tokens": (0, 300),
        "output_tokens": (0, 150),
    }
    for number in numbers:
        table.release(number)
    assert table.is_idle()


def test_a_restarted_router_finds_its_old_work_in_the_figures() -> None:
    old = Table(1)
    for _ in range(3):
        old.book(0, Phase.DECODE, 100, 50)
    reborn = Table(1)
    # Its numbers begin at 1 again, under another id, of which the engine saw nothing.
    reborn.hear(0, **message(incarnation=1, sequence=9, running=3, output_tokens=150))
    heard = reborn.heard(0)
    assert heard is not None
    assert (heard["running"], heard["output_tokens"]) == (3, 150)
    assert reborn.unseen(0)["legs"] == (0, 0)
    reborn.book(0, Phase.DECODE, 10, 5)
    assert reborn.unseen(0)["legs"] == (0, 1)


def test_a_lost_release_ends_with_its_lease() -> None:
    table = Table(2, lease_s=60.0)
    table.book(0, Phase.PREFILL, 10, 1, now_s=100.0)
    table.book(1, Phase.DECODE, 10, 99, now_s=150.0)
    assert table.expire(161.0) == 1
    assert (table.in_flight(0), table.in_flight(1)) == (0, 1)
    assert table.expire(211.0) == 1
    assert table.is_idle()


def test_silence_is_since_the_last_message_taken_in() -> None:
    table = Table(1)
    assert table.silence_s(0, 5.0) == math.inf
    assert table.heard(0) is None
    first = message(incarnation=7, sequence=3, running=2, now_s=5.0)
    assert table.hear(0, **first)
    assert table.heard(0) == first
    assert not table.hear(0, **message(incarnation=7, sequence=3, now_s=8.0))
    assert table.silence_s(0, 9.0) == 4.0
    assert table.silence_s(0, 1.0) == 0.0


def test_a_living_engine_is_heard_whatever_its_dead_ones_said() -> None:
    table = Table(1)
    for living, late in ((1, 2), (3, 1), (4, 3)):
        assert table.hear(0, **message(incarnation=living, sequence=living, running=5))
        assert table.hear(0, **message(incarnation=late, sequence=90 + living))
        assert table.hear(0, **message(incarnation=living, sequence=living + 1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"running": -1},
        {"prefill_tokens": -5},
        {"kv_free_blocks": 1},
        {"now_s": math.nan},
        {"now_s": math.inf},
    ],
)
def test_figures_that_cannot_be_are_refused_and_change_nothing(
    wrong: dict[str, float],
) -> None:
    table = Table(1)
    number = table.book(0, Phase.DECODE, 1, 1)
    with pytest.raises(ValueError, match=r"below zero|free than|finite"):
        table.hear(
            0, **message(incarnation=1, sequence=1, booking_seen=number, **wrong)
        )
    assert table.heard(0) is None
    assert table.unseen(0)["legs"] == (0, 1)


def test_more_cached_than_there_is_is_refused() -> None:
    table = Table(1)
    with pytest.raises(ValueError, match="cached_tokens"):
        table.book(0, Phase.PREFILL, 10, 1, cached_tokens=11)
    assert table.is_idle()


@pytest.mark.parametrize(
    "wrong", [{"lease_s": 0.0}, {"stale_s": -1.0}, {"stale_s": 3.0, "dead_s": 2.0}]
)
def test_patience_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"_s must be"):
        Table(1, **wrong)
