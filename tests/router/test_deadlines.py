from __future__ import annotations

from typing import Any

import pytest

from tests.router.requests import answer, prefilled, request
from vllm_calrouter.options import RouterOptions, parse
from vllm_calrouter.placement.costs import engine_costs
from vllm_calrouter.router.deadlines import Deadlines
from vllm_calrouter.router.router import Router
from vllm_calrouter.router.wishes import Wishes

SLO = {"extra_args": {"slo_ttft_ms": 500.0}}


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def router(clock: Clock, **options: Any) -> Router:
    return Router(parse({"prefill": 1, **options}), 2, clock=clock)


def told(leg: Any) -> dict[str, Any]:
    named: dict[str, Any] = leg.sampling_params.extra_args["calrouter"]
    return {key: named[key] for key in ("sent_s", "deadline_s") if key in named}


def test_legs_tell_no_deadline_where_nobody_orders() -> None:
    assert told(router(Clock(), order="fcfs").begin(request(params=SLO))) == {}


def test_with_the_first_token_from_prefill_its_deadline_is_the_target() -> None:
    leg = router(Clock(), order="deadline").begin(request(params=SLO))
    assert told(leg) == {"sent_s": 1000.0, "deadline_s": 0.5}


def test_without_it_decode_takes_what_it_needs() -> None:
    clock = Clock()
    made = router(clock, order="deadline", first_token=False)
    left_s = told(made.begin(request(params=SLO)))["deadline_s"]
    assert 0.5 - 0.05 < left_s < 0.5 - 0.02

    clock.now_s += 0.4
    (leg,) = made.answered(answer(prefilled("r")))
    assert told(leg)["deadline_s"] == pytest.approx(0.1)


@pytest.mark.parametrize("more", [{}, {"max_tokens": 1}])
def test_a_leg_that_is_due_is_placed_where_it_makes_nobody_late(
    more: dict[str, Any],
) -> None:
    """The router tells its placement by when a prefill leg should have ended."""
    clock = Clock()
    made = Router(parse({"prefill": 2, "policy": "deadline"}), 3, clock=clock)
    ranks = []
    # One that can just be in time, one with time to spare, and one in a hurry.
    for number, ttft_ms in enumerate((240.0, 60_000.0, 200.0)):
        leg = made.begin(
            request(
                f"r{number}",
                prompt=2000 if number < 2 else 100,
                params={"extra_args": {"slo_ttft_ms": ttft_ms}, **more},
            )
        )
        ranks.append(leg.data_parallel_rank)
    assert ranks[0] != ranks[1]
    assert ranks[2] == ranks[1]


def test_a_target_that_is_missed_is_told_as_such() -> None:
    clock = Clock()
    made = router(clock, order="deadline", first_token=False)
    made.begin(request(params=SLO))
    clock.now_s += 2.0
    (leg,) = made.answered(answer(prefilled("r")))
    assert told(leg)["deadline_s"] == pytest.approx(-1.5)


def test_without_a_target_only_the_time_of_sending_is_told() -> None:
    assert told(router(Clock(), order="deadline").begin(request())) == {
        "sent_s": 1000.0
    }


def test_one_leg_has_the_whole_target() -> None:
    params = {**SLO, "max_tokens": 1}
    leg = router(Clock(), order="short_first").begin(request(params=params))
    assert told(leg)["deadline_s"] == 0.5


def test_a_longer_transfer_leaves_less_for_prefill() -> None:
    options = RouterOptions(prefill=1)
    deadlines = Deadlines(options, 2, engine_costs(options, 2))
    wishes = Wishes(ttft_s=1.0)
    left = [deadlines.prefill_s(wishes, t, early=False) for t in (100, 30_000)]
    assert left[1] < left[0] < 1.0  # type: ignore[operator]
    assert deadlines.prefill_s(wishes, 100, early=True) == 1.0
    assert deadlines.prefill_s(Wishes(), 100, early=False) is None
