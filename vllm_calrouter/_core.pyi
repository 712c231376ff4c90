import enum
from typing import TypedDict

class Phase(enum.IntEnum):
    PREFILL = 0
    DECODE = 1

class Costs:
    """One engine's constants: seconds, tokens, bytes (docs/pricing.md).

    Raises ValueError naming the constant that is negative, not finite, or 0 where work
    would then be free.
    """

    def __init__(
        self,
        *,
        prefill_base_s: float,
        prefill_per_token_s: float,
        prefill_per_token_sq_s: float,
        decode_base_s: float,
        decode_per_seq_s: float,
        decode_per_context_token_s: float,
        transfer_base_s: float,
        transfer_bytes_per_s: float,
        kv_bytes_per_token: int,
        kv_capacity_tokens: int,
        far_transfer_base_s: float | None = None,
        far_transfer_bytes_per_s: float | None = None,
    ) -> None:
        """Of a transfer between hosts, None: as within one."""

    @property
    def prefill_base_s(self) -> float: ...
    @property
    def prefill_per_token_s(self) -> float: ...
    @property
    def prefill_per_token_sq_s(self) -> float: ...
    @property
    def decode_base_s(self) -> float: ...
    @property
    def decode_per_seq_s(self) -> float: ...
    @property
    def decode_per_context_token_s(self) -> float: ...
    @property
    def transfer_base_s(self) -> float: ...
    @property
    def transfer_bytes_per_s(self) -> float: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def kv_capacity_tokens(self) -> int: ...
    @property
    def far_transfer_base_s(self) -> float: ...
    @property
    def far_transfer_bytes_per_s(self) -> float: ...

class Heard(TypedDict):
    """An engine's last message, in tokens, sequences and blocks."""

    incarnation: int
    sequence: int
    booking_seen: int
    prefill_tokens: int
    output_tokens: int
    context_tokens: int
    running: int
    waiting: int
    waiting_remote: int
    kv_total_blocks: int
    kv_free_blocks: int
    kv_pinned_blocks: int
    block_tokens: int
    now_s: float
    step_age_s: float

class Unseen(TypedDict):
    """Sums over own bookings above an engine's echo; index them by `Phase`."""

    legs: tuple[int, int]
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

class Table:
    """What one router has booked on each engine, and what engines said of themselves.

    Ranks out of range raise IndexError.
    """

    def __init__(
        self,
        engines: int,
        *,
        lease_s: float = 3600.0,
        silent_s: float = 0.3,
        stale_s: float = 1.0,
        dead_s: float = 10.0,
    ) -> None:
        """Args:
            engines: how many; ranks are 0 to engines - 1.
            lease_s: age at which `expire` drops a booking.
            silent_s: time without a message beyond this is added to the price.
            stale_s: so is time without news beyond this, a step under way included.
            dead_s: an engine silent longer is not chosen, unless all are.

        Raises ValueError: no engines, no lease, dead_s below stale_s.
        """

    @property
    def engines(self) -> int: ...
    def book(
        self,
        rank: int,
        phase: Phase,
        prompt_tokens: int,
        output_tokens: int,
        *,
        cached_tokens: int = 0,
        now_s: float = ...,
        due_s: float = ...,
    ) -> int:
        """Book one leg; returns its number, which starts at 1 and only grows.

        Args:
            cached_tokens: of the prompt, not to be computed.
            now_s: when its lease begins; by default when `expire` first meets it.
            due_s: when it should have ended, on the same clock; by default whenever.

        Raises ValueError: more cached than there is, `due_s` is no number.
        """

    def release(self, booking: int) -> bool:
        """End a booking; False when it is unknown or was released before."""

    def expire(self, now_s: float) -> int:
        """Drop the bookings whose lease has passed; returns how many."""

    def hear(
        self,
        rank: int,
        *,
        incarnation: int,
        sequence: int,
        booking_seen: int,
        prefill_tokens: int,
        output_tokens: int,
        context_tokens: int,
        running: int,
        waiting: int,
        waiting_remote: int,
        kv_total_blocks: int,
        kv_free_blocks: int,
        kv_pinned_blocks: int,
        block_tokens: int,
        now_s: float,
        step_age_s: float = 0.0,
    ) -> bool:
        """Take in an engine's message; False when it is stale.

        Stale: its sequence is not above the last one's, of the same incarnation. A
        message of another incarnation replaces all that was heard.

        Args:
            booking_seen: the highest booking of this router's the figures include.
            prefill_tokens: prompt tokens still to compute, waiting and running.
            output_tokens: predicted output tokens still to come; 0: unknown.
            context_tokens: tokens of KV in the running batch.
            running, waiting, waiting_remote: sequences, each counted in one of them;
                waiting_remote have their KV blocks and wait for what goes in.
            kv_pinned_blocks: not free, of finished prompts that are still to be read.
            now_s: on the clock of `Policy.pick`.
            step_age_s: how long the step under way had been so when it was told.

        Raises ValueError: a figure below 0, more blocks free than there are.
        """

    def silence_s(self, rank: int, now_s: float) -> float:
        """Seconds since an engine was heard; infinite when it never was."""

    def heard(self, rank: int) -> Heard | None:
        """An engine's last message as told; None when there was none."""

    def unseen(self, rank: int) -> Unseen:
        """Own open bookings that an engine's last message does not include."""

    def set_costs(self, rank: int, costs: Costs) -> None:
        """What work costs on an engine from now on; read by the pricing policies."""

    def set_limits(
        self, rank: int, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        """An engine's scheduler limits; 128 and 2,048, vLLM's own, until set.

        Raises ValueError when one is below 1.
        """

    def set_host(self, rank: int, host: int) -> None:
        """Engines of one number share a host; all do until this is said."""

    def report(self, rank: int, waiting: int, running: int, kv_usage: float) -> None:
        """Take over vLLM's counts of an engine: requests, requests, KV fraction."""

    def legs(self, rank: int, phase: Phase) -> int:
        """Open bookings of one phase."""

    def in_flight(self, rank: int) -> int:
        """Open bookings of both phases."""

    def prompt_tokens(self, rank: int) -> int: ...
    def output_tokens(self, rank: int) -> int: ...
    def open_bookings(self) -> int: ...
    def is_idle(self) -> bool:
        """No booking is open and every counter is exactly zero."""

class Prefixes:
    """What engines' prefix caches are likely to hold, by the prompts sent there.

    Prompts are told apart by chunks of `PREFIX_CHUNK_TOKENS`. Of an engine the least
    recently used are forgotten where they exceed its KV cache, and all when it tells of
    another incarnation. Methods raise ValueError for a table of other engines.
    """

    def __init__(self, engines: int) -> None: ...
    @property
    def engines(self) -> int: ...
    def look(self, table: Table, salt: int, prompt: list[int]) -> None:
        """Look a prompt up; `salt` stands for all else by which caches tell apart."""

    def cached_tokens(self, rank: int) -> int:
        """Of the prompt looked up last, tokens that an engine need not compute."""

    def keep(self, table: Table, rank: int) -> None:
        """The prompt looked up last goes to this engine."""

    def chunks(self, rank: int) -> int:
        """Chunks remembered of an engine."""

    def clear(self) -> None:
        """Forget all."""

class Policy:
    """Picks one of the ranks [begin, end); made by `make_policy`."""

    @property
    def name(self) -> str: ...
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    def pick(
        self,
        table: Table,
        prompt_tokens: int,
        output_tokens: int,
        *,
        cached_tokens: int = 0,
        slo_ttft_s: float = 0.0,
        slo_tpot_s: float = 0.0,
        now_s: float = 0.0,
        source_rank: int = -1,
        prefixes: Prefixes | None = None,
        due_s: float = ...,
    ) -> int:
        """A rank for a request of this size (output predicted).

        Args:
            cached_tokens: of the prompt, on the engines already.
            slo_ttft_s: seconds from now to the first token; 0: no target, below 0:
                overdue.
            slo_tpot_s: seconds between tokens; 0: no target.
            now_s: on the clock of `Table.hear`; by default no engine counts as silent.
            source_rank: the engine that has its KV cache; -1: none, or unknown.
            prefixes: has looked the prompt up; says instead of `cached_tokens` how much
                of it each engine has.
            due_s: when this leg should have ended, on the clock of `now_s`; by default
                whenever. Read by `deadline`.

        Raises IndexError when the pool or `source_rank` exceeds the table, ValueError
        when tokens are below 0, more are cached than there are, `due_s` is no number or
        `prefixes` are of other engines, RuntimeError when a pricing policy meets an
        engine without costs.
        """

    def decide(
        self,
        table: Table,
        prompt_tokens: int,
        output_tokens: int,
        *,
        cached_tokens: int = 0,
        slo_ttft_s: float = 0.0,
        slo_tpot_s: float = 0.0,
        now_s: float = 0.0,
        source_rank: int = -1,
        prefixes: Prefixes | None = None,
        due_s: float = ...,
    ) -> tuple[int, str, tuple[tuple[int, float], ...]]:
        """`pick`, `reason` and `scores` in one call."""

    def scores(self) -> tuple[tuple[int, float], ...]:
        """Candidates of the last pick as looked at; lower is better."""

    def terms(self) -> dict[int, dict[str, float]]:
        """What each score of the last pick is the sum of: rank to `TERMS` to seconds.

        Empty for policies that do not price.
        """

    def price(self, rank: int) -> dict[str, float]:
        """The terms of one candidate of the last pick, in seconds.

        Raises KeyError for one that was none, RuntimeError where nobody prices.
        """

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
    serves: Phase | None = None,
    slot_weight: float = 1.0,
    kv_weight: float = 1.0,
    slo_weight: float = 1.0,
) -> Policy:
    """A policy over the ranks [begin, end).

    Args:
        name: one of `POLICIES`.
        begin, end: the pool.
        start: offset in the pool at which turns begin.
        routers: how many routers share the engines.
        seed: of `power_of_two`'s draws.
        threshold_tokens, long_share: of `length_threshold`.
        serves: the phase the pool runs, which the policies that price need to know;
            None: both.
        slot_weight, kv_weight, slo_weight: of the policies that price
            (docs/pricing.md).

    Raises ValueError: unknown name, empty pool, share outside (0, 1], negative weight.
    """

def replay(
    table: Table,
    prefill: Policy,
    decode: Policy,
    script: list[tuple[dict[str, float] | None, int, int, float, float]],
    *,
    under_way: int,
    all_new: bool = False,
) -> tuple[list[tuple[int, int]], list[float]]:
    """Choose and book a pair for each request of a script; for benchmarks.

    Args:
        script: for each request a message to hear first (`Table.hear`'s arguments, or
            None), prompt tokens, predicted output tokens, now_s, due_s.
        under_way: requests that are under way at most; the oldest ends first.
        all_new: every engine counts as changed before every choice.

    Returns the picked pairs, and the seconds each pair of picks took.
    """

PREFIX_CHUNK_TOKENS: int
POLICIES: tuple[str, ...]
TERMS: tuple[str, ...]
