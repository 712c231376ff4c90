"""What engines' prefix caches are expected to hold."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.price import A40_QWEN_3B
from tests.placement.test_ledger import message
from vllm_calrouter._core import PREFIX_CHUNK_TOKENS as CHUNK
from vllm_calrouter._core import Phase, Prefixes, Table
from vllm_calrouter.options import RouterOptions
from vllm_calrouter.placement import Placer, Pools, Prompt


def a_table(engines: int, kv_tokens: int = 60_000) -> Table:
    table = Table(engines)
    for rank in range(engines):
        tell(table, rank, kv_tokens=kv_tokens)
    return table


def tell(table: Table, rank: int, *, incarnation: int = 1, kv_tokens: int) -> None:
    blocks = kv_tokens // 16
    table.hear(
        rank,
        **message(
            incarnation=incarnation,
            sequence=1,
            kv_total_blocks=blocks,
            kv_free_blocks=blocks,
            block_tokens=16,
        ),
    )


def prompt(*chunks: int, rest: int = 0) -> list[int]:
    """Chunks of one token id each, and some tokens more."""
    return [name for name in chunks for _ in range(CHUNK)] + [99] * rest


def cached(
    prefixes: Prefixes, table: Table, ids: list[int], salt: int = 0
) -> list[int]:
    prefixes.look(table, salt, ids)
    return [prefixes.cached_tokens(rank) for rank in range(table.engines)]


def send(
    prefixes: Prefixes, table: Table, rank: int, ids: list[int], salt: int = 0
) -> None:
    prefixes.look(table, salt, ids)
    prefixes.keep(table, rank)


def test_what_was_sent_somewhere_is_there_as_far_as_it_is_the_same() -> None:
    table, prefixes = a_table(3), Prefixes(3)
    send(prefixes, table, 1, prompt(1, 2, 3, rest=5))
    assert cached(prefixes, table, prompt(1, 2, 4, rest=1)) == [0, 2 * CHUNK, 0]
    send(prefixes, table, 2, prompt(1, rest=1))
    assert cached(prefixes, table, prompt(1, 2, 3, 4)) == [0, 3 * CHUNK, CHUNK]
    # The same chunk after another beginning is another.
    assert cached(prefixes, table, prompt(2, 2, 3)) == [0, 0, 0]
    assert cached(prefixes, table, [], 0) == [0, 0, 0]


def test_the_last_token_is_always_computed() -> None:
    table, prefixes = a_table(1), Prefixes(1)
    send(prefixes, table, 0, prompt(1, 2))
    assert cached(prefixes, table, prompt(1, 2)) == [CHUNK]
    assert cached(prefixes, table, prompt(1, 2, rest=1)) == [2 * CHUNK]


def test_adapters_and_salts_have_caches_of_their_own() -> None:
    table, prefixes = a_table(1), Prefixes(1)
    send(prefixes, table, 0, prompt(1, 2), salt=-5)
    assert cached(prefixes, table, prompt(1, 2), salt=0) == [0]
    assert cached(prefixes, table, prompt(1, 2), salt=-5) == [CHUNK]


def test_an_engine_started_anew_has_nothing() -> None:
    table, prefixes = a_table(2), Prefixes(2)
    for rank in range(2):
        send(prefixes, table, rank, prompt(1, 2))
    tell(table, 0, incarnation=2, kv_tokens=60_000)
    assert cached(prefixes, table, prompt(1, 2)) == [0, CHUNK]
    send(prefixes, table, 0, prompt(3))
    assert prefixes.chunks(0) == 1
    assert cached(prefixes, table, prompt(1, 2)) == [0, CHUNK]


def test_emptied_caches_are_forgotten() -> None:
    table, prefixes = a_table(1), Prefixes(1)
    send(prefixes, table, 0, prompt(1, 2))
    prefixes.clear()
    assert cached(prefixes, table, prompt(1, 2)) == [0]
    assert prefixes.chunks(0) == 0


class Lru:
    """One engine's, in plain Python: chunks by all that is before them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.kept: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def keep(self, names: tuple[int, ...]) -> None:
        for end in range(len(names), 0, -1):
            self.kept[names[:end]] = None
            self.kept.move_to_end(names[:end])
        while len(self.kept) > self.most:
            self.kept.popitem(last=False)

    def cached(self, names: tuple[int, ...]) -> int:
        found = 0
        while found < len(names) and names[: found + 1] in self.kept:
            found += 1
        return found


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.lists(st.integers(0, 2), max_size=6).map(tuple),
        ),
        max_size=60,
    ),
    st.integers(1, 12),
)
def test_it_is_a_cache_of_the_least_recently_used(
    story: list[tuple[int, tuple[int, ...]]], most: int
) -> None:
    table, prefixes = a_table(3, kv_tokens=most * CHUNK), Prefixes(3)
    engines = [Lru(most) for _ in range(3)]
    for rank, names in story:
        expected = [engine.cached(names) * CHUNK for engine in engines]
        assert cached(prefixes, table, prompt(*names, rest=1)) == expected
        prefixes.keep(table, rank)
        engines[rank].keep(names)
        assert [prefixes.chunks(r) for r in range(3)] == [len(e.kept) for e in engines]


def test_a_table_of_other_engines_is_refused() -> None:
    with pytest.raises(ValueError, match="2 engines, a table of 3"):
        Prefixes(2).look(a_table(3), 0, [1])
    with pytest.raises(IndexError):
        Prefixes(2).keep(a_table(2), 2)
    with pytest.raises(TypeError):
        Prefixes(2).look(a_table(2), 0, ["a"])  # type: ignore[list-item]


def ranks(placer: Placer, requests: int = 12) -> list[int]:
    """Where a conversation's requests go that grows by a chunk each, one by one."""
    found = []
    for turn in range(requests):
        ids = prompt(*range(turn + 20))
        choice = placer.choose(Phase.PREFILL, len(ids), 50, prompt=Prompt(ids))
        found.append(choice.rank)
    return found


def a_placer(**options: object) -> Placer:
    return Placer(
        RouterOptions(policy="calibrated", prefill=4, **options),  # type: ignore[arg-type]
        Pools(8, 4),
        costs=[A40_QWEN_3B] * 8,
    )


def test_a_conversation_stays_where_its_prompt_is_cached() -> None:
    assert len(set(ranks(a_placer()))) == 1
    # Equal prices take turns.
    assert len(set(ranks(a_placer(prefix_aware=False)))) == 4


def test_a_long_backlog_outweighs_a_cached_prompt() -> None:
    placer = a_placer()
    ids = prompt(*range(4), rest=1)
    home = placer.choose(Phase.PREFILL, len(ids), 50, prompt=Prompt(ids))
    again = placer.choose(Phase.PREFILL, len(ids), 50, prompt=Prompt(ids))
    assert (again.rank, again.cached_tokens) == (home.rank, 4 * CHUNK)
    placer.table.book(home.rank, Phase.PREFILL, 20_000, 1)
    moved = placer.choose(Phase.PREFILL, len(ids), 50, prompt=Prompt(ids))
    assert moved.rank != home.rank
    assert moved.cached_tokens == 0


def test_emptying_the_caches_ends_the_preference() -> None:
    placer = a_placer()
    first = ranks(placer, 3)
    placer.forget_prefixes()
    ids = prompt(*range(20))
    choice = placer.choose(Phase.PREFILL, len(ids), 50, prompt=Prompt(ids))
    assert choice.cached_tokens == 0
    assert choice.rank != first[0]


@pytest.mark.parametrize("pools", [Pools(8, 4), Pools(8, 0)])
def test_only_who_computes_a_prompt_has_it_cached(pools: Pools) -> None:
    options = RouterOptions(policy="calibrated", prefill=pools.prefill)
    placer = Placer(options, pools)
    ids = prompt(1, 2, 3)
    found = [
        placer.choose(Phase.DECODE, len(ids), 50, prompt=Prompt(ids)).cached_tokens
        for _ in range(2)
    ]
    assert found == ([0, 0] if pools.disaggregated else [0, 2 * CHUNK])
