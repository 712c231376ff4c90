"""The benchmark's arithmetic, and that both sides run the same steps."""

from __future__ import annotations

import json

import pytest

from benchmarks import publish_overhead
from benchmarks.publish_overhead import Cost, Side, arguments, sides, summary, table


def side(costs_us: list[float], publishing_us: float = 0.0, messages: int = 0) -> Side:
    costs = [Cost(cpu * 1e-6, cpu * 2e-6) for cpu in costs_us]
    return Side(None, None, 64, costs, publishing_us * 1e-6, messages)


def test_the_share_is_observing_and_publishing_over_the_step() -> None:
    result = summary(side([300, 500]), side([310, 530], 60, 2), 0.01)
    assert result["observing_us"] == 20.0
    assert result["publishing_us"] == 30.0
    assert result["share_of_step"] == pytest.approx(50e-6 / 0.01)
    assert result["messages_per_step"] == 1.0
    assert result["wall_us"] == 40.0


def test_only_the_same_steps_are_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        summary(side([300]), side([310, 530]), 0.01)


def test_the_table_says_the_share() -> None:
    result = summary(side([300, 500]), side([310, 530], 60, 2), 0.01)
    assert "0.50%" in table(result)
    json.dumps(result)


def test_both_sides_run_the_same_steps_and_one_tells() -> None:
    with sides(batch=4) as (plain, telling):
        for _ in range(60):
            for each in (plain, telling):
                each.block(1, 0.0)
        running = [
            [(r.request_id, r.num_tokens) for r in each.scheduler.running]
            for each in (plain, telling)
        ]
        assert running[0] == running[1]
        assert len(running[0]) == 4
        said = telling.scheduler.observer.message()
        assert (said.running, said.waiting) == (4, publish_overhead._WAITING)
        assert said.steps == 60
        assert telling.publisher is not None
        assert telling.publisher.sent > 0
        assert not hasattr(plain.scheduler, "observer")


@pytest.mark.parametrize(
    "words", [["--rounds", "1"], ["--batch", "0"], ["--step-ms", "0"]]
)
def test_too_little_to_measure_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(words)
    assert "must be at least" in capsys.readouterr().err
