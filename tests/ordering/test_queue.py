"""Our queue where vLLM expects one of its own."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import RequestStatus

from tests.ordering.jobs import COSTS, step
from vllm_calrouter.ordering import Deadline, Job, Order, ShortFirst
from vllm_calrouter.ordering.queue import OrderedQueue

ORDERS: dict[str, Callable[[], Order]] = {
    "short_first": ShortFirst,
    "deadline": lambda: Deadline(2.0),
    "unbounded": Deadline,
}


def request(name: str, tokens: int = 100, **more: Any) -> Any:
    settings = {"priority": 0, "due_s": 9.0, "status": RequestStatus.WAITING, **more}
    return SimpleNamespace(request_id=name, tokens=tokens, **settings)


def queue(order: str = "short_first", *, by_priority: bool = False) -> OrderedQueue:
    numbers = count(1)

    def read(one: Any) -> Job:
        return Job(
            request=one,
            number=next(numbers),
            arrived_s=0.0,
            tokens=one.tokens,
            squares=one.tokens**2,
            cost_s=COSTS.prefill_s(one.tokens),
            deadline_s=one.due_s,
            urgency_s=one.due_s,
        )

    return OrderedQueue(read, ORDERS[order], by_priority=by_priority)


def filled(order: str = "short_first", *, by_priority: bool = False) -> Any:
    made = queue(order, by_priority=by_priority)
    requests = [request(f"r{n}", tokens=1000 - 100 * n, due_s=9 - n) for n in range(4)]
    for one in requests:
        made.add_request(one)
    return made, requests


def drained(made: OrderedQueue) -> list[Any]:
    return [made.pop_request() for _ in range(len(made))]


def test_every_method_of_vllm_s_interface_is_ours() -> None:
    for name, _ in inspect.getmembers(RequestQueue, inspect.isfunction):
        assert name in vars(OrderedQueue), name


@pytest.mark.parametrize("order", list(ORDERS))
def test_who_is_peeked_at_is_who_is_popped(order: str) -> None:
    made, requests = filled(order)
    assert list(made) == requests[::-1]
    for expected in requests[::-1]:
        assert made.peek_request() is expected
        assert made.pop_request() is expected
    assert not made
    for method in (made.peek_request, made.pop_request):
        with pytest.raises(IndexError):
            method()


@pytest.mark.parametrize("order", list(ORDERS))
def test_a_preempted_request_goes_before_all_who_wait(order: str) -> None:
    made, _ = filled(order)
    first, second = request("p1", tokens=9000), request("p2", tokens=9000)
    # vLLM preempts from the end of its batch, so the older one comes back last.
    made.prepend_request(second)
    made.prepend_request(first)
    made.begin_step(step())
    assert drained(made)[:2] == [first, second]


@pytest.mark.parametrize("order", list(ORDERS))
def test_a_skipped_request_keeps_its_place(order: str) -> None:
    made, requests = filled(order)
    made.begin_step(step())
    skipped = [made.pop_request(), made.pop_request()]
    made.prepend_requests(skipped[::-1])
    made.end_step()
    made.begin_step(step())
    assert list(made) == requests[::-1]
    assert drained(made) == requests[::-1]


def test_a_step_is_offered_whom_it_was_chosen_for() -> None:
    made = queue("deadline")
    first = request("first", due_s=COSTS.prefill_s(100) + 0.01)
    made.add_request(other := request("other", 900))
    made.add_request(first)
    made.begin_step(step())
    assert made.pop_request() is first
    first.status = RequestStatus.RUNNING
    assert (bool(made), len(made)) == (False, 1)
    made.end_step()
    assert made
    assert made.peek_request() is other


def test_were_all_of_them_skipped_the_others_are_offered() -> None:
    made = queue("deadline")
    others = [request("second", 900, due_s=8.0), request("third", 900, due_s=9.0)]
    blocked = request("blocked", due_s=COSTS.prefill_s(100) + 0.01)
    for one in (*others, blocked):
        made.add_request(one)
    made.begin_step(step())
    assert made.pop_request() is blocked
    for other in others:
        assert made
        assert made.pop_request() is other
        other.status = RequestStatus.RUNNING
    assert not made
    made.prepend_requests([blocked])
    made.end_step()
    assert drained(made) == [blocked]


def test_a_preempted_request_that_is_skipped_stays_in_front() -> None:
    made, _ = filled()
    made.prepend_request(back := request("p", tokens=9000))
    made.begin_step(step())
    assert made.pop_request() is back
    made.prepend_requests([back])
    made.end_step()
    made.begin_step(step())
    assert made.peek_request() is back


def test_priority_is_above_everything() -> None:
    made = queue("deadline", by_priority=True)
    late = request("late", due_s=-9.0, priority=-1)
    urgent = request("urgent", due_s=0.1, priority=5)
    back = request("back", priority=5)
    made.add_request(urgent)
    made.add_request(late)
    made.prepend_request(back)
    made.begin_step(step())
    assert list(made) == [late, back, urgent]
    assert drained(made) == [late, back, urgent]


def test_priority_means_nothing_where_vllm_has_it_off() -> None:
    made = queue("deadline")
    made.add_request(first := request("a", due_s=1.0, priority=5))
    made.add_request(second := request("b", due_s=2.0, priority=0))
    assert drained(made) == [first, second]


@pytest.mark.parametrize("order", list(ORDERS))
def test_priorities_nobody_waits_under_cost_no_memory(order: str) -> None:
    made = queue(order, by_priority=True)
    for priority in range(200):
        made.add_request(request(f"r{priority}", priority=priority))
        made.begin_step(step())
        made.pop_request()
        made.end_step()
    assert len(made._levels) <= 2


def test_removing_takes_only_who_is_here() -> None:
    made, requests = filled("deadline")
    made.begin_step(step())
    made.remove_requests({1: requests[3], 2: request("elsewhere")}.values())
    made.remove_request(requests[1])
    assert list(made) == [requests[2], requests[0]]
    assert drained(made) == [requests[2], requests[0]]
    with pytest.raises(ValueError, match="r1"):
        made.remove_request(requests[1])


_ACTIONS = ("add", "step", "abort", "preempt")


@pytest.mark.parametrize("order", list(ORDERS))
@given(
    actions=st.lists(st.sampled_from(_ACTIONS), min_size=1, max_size=60),
    by_priority=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
def test_nobody_is_lost_and_nobody_comes_twice(
    order: str, actions: list[str], by_priority: bool, rng: random.Random
) -> None:
    made = queue(order, by_priority=by_priority)
    waiting: dict[str, Any] = {}
    running: dict[str, Any] = {}
    now_s = 0.0
    for number, action in enumerate(actions):
        now_s += 0.1
        if action == "add":
            fresh = request(
                f"r{number}",
                tokens=rng.randint(1, 3000),
                due_s=now_s + rng.uniform(-0.5, 2),
                priority=rng.randint(0, 2),
            )
            made.add_request(fresh)
            waiting[fresh.request_id] = fresh
        elif action == "abort" and waiting:
            gone = rng.sample(sorted(waiting), rng.randint(1, len(waiting)))
            made.remove_requests([waiting.pop(name) for name in gone])
        elif action == "preempt" and running:
            name = rng.choice(sorted(running))
            waiting[name] = running.pop(name)
            waiting[name].status = RequestStatus.PREEMPTED
            made.prepend_request(waiting[name])
        elif action == "step":
            made.begin_step(step(now_s, seqs_left=rng.randint(1, 4)))
            skipped = []
            for _ in range(rng.randint(0, len(made))):
                one = made.peek_request()
                assert made.pop_request() is one
                if rng.random() < 0.3:
                    skipped.insert(0, one)
                else:
                    running[one.request_id] = waiting.pop(one.request_id)
                    one.status = RequestStatus.RUNNING
            made.prepend_requests(skipped)
            made.end_step()
        assert len(made) == len(waiting)
        assert bool(made) == bool(waiting)
        listed = list(made)
        assert sorted(one.request_id for one in listed) == sorted(waiting)
        if by_priority and waiting:
            highest = min(one.priority for one in waiting.values())
            assert made.peek_request().priority == highest
    assert {one.request_id for one in drained(made)} == set(waiting)
