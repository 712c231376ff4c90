"""The benchmark's arithmetic, and that both sides run the same steps."""

from __future__ import annotations

import json

import pytest

from benchmarks import publish_overhead
from benchmarks.publish_overhead import (
    BLOCK_STEPS,
    Side,
    arguments,
    sides,
    summary,
    table,
    typical_us,
)


def side(costs_us: list[float], publishing_us: list[float], messages: int = 0) -> Side:
    stepping_s, publishing_s = (
        [each * 1e-6 for each in times] for times in (costs_us, publishing_us)
    )
    return Side(None, None, 64, stepping_s, publishing_s, messages)


def test_a_round_s_mean_and_the_median_of_rounds() -> None:
    quiet = [1e-6, 3e-6] + [2e-6] * (BLOCK_STEPS - 2)
    disturbed = [1.0] * BLOCK_STEPS
    assert typical_us(quiet + disturbed + quiet) == pytest.approx(2.0)


PLAIN = side([300, 500, 400], [])
TELLING = side([310, 530, 480], [30, 10, 50], 6)


def test_the_share_is_observing_and_publishing_over_the_step() -> None:
    result = summary(PLAIN, TELLING, 0.01)
    assert (result["observing_us"], result["publishing_us"]) == (40.0, 30.0)
    assert result["share_of_step"] == pytest.approx(70e-6 / 0.01)
    assert result["share_of_scheduler"] == pytest.approx(70 / 400)
    assert result["messages_per_step"] == 2.0


def test_only_the_same_steps_are_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        summary(side([300], []), TELLING, 0.01)


def test_the_table_says_the_share() -> None:
    result = summary(PLAIN, TELLING, 0.01)
    assert "0.70%" in table(result)
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
