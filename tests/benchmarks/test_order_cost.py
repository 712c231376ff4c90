from __future__ import annotations

from benchmarks import order_cost


def test_the_cost_of_an_order_is_measured() -> None:
    engine = order_cost.Engine("deadline", 20)
    seconds, admitted = engine.step()
    assert seconds > 0
    assert admitted > 0
