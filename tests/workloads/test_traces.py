"""Replay of recorded arrivals."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_calrouter.workloads import Replay, WorkloadError, replay

HEAD = "arrival_s,input_tokens,output_tokens"


def trace(tmp_path: Path, *lines: str, head: str = HEAD) -> Path:
    file = tmp_path / "trace.csv"
    file.write_text("\n".join([head, *lines]) + "\n")
    return file


def test_a_trace_is_replayed_as_recorded(tmp_path: Path) -> None:
    made = replay(trace(tmp_path, "0,10,5", "1.5,20,6"))
    assert [(o.arrival_s, o.prompt_tokens, o.output_tokens) for o in made] == [
        (0, 10, 5),
        (1.5, 20, 6),
    ]
    assert {o.slo for o in made} <= {"tight", "loose"}


def test_a_gzipped_trace_is_the_same_trace(tmp_path: Path) -> None:
    plain = trace(tmp_path, "0,10,5", "1.5,20,6")
    zipped = tmp_path / "whatever.name"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert replay(zipped) == replay(plain)


def test_a_window_begins_at_zero_and_ends_before_its_end(tmp_path: Path) -> None:
    file = trace(tmp_path, *(f"{second},10,5" for second in range(100)))
    made = replay(file, Replay(start_s=20, duration_s=30))
    assert [o.arrival_s for o in made] == list(range(30))


def test_a_rate_stretches_the_window(tmp_path: Path) -> None:
    file = trace(tmp_path, *(f"{second},10,5" for second in range(100)))
    made = replay(file, Replay(start_s=20, duration_s=30, rate=4))
    assert [o.arrival_s for o in made] == pytest.approx([n / 4 for n in range(30)])


def test_the_rate_holds_past_the_end_of_the_trace(tmp_path: Path) -> None:
    file = trace(tmp_path, *(f"{second},10,5" for second in range(101)))
    made = replay(file, Replay(start_s=80, duration_s=1_000, rate=2))
    assert len(made) / made[-1].arrival_s == pytest.approx(2)


def test_requests_left_out_do_not_lower_the_rate(tmp_path: Path) -> None:
    lengths = (10, 9_000)
    file = trace(tmp_path, *(f"{n},{lengths[n % 2]},5" for n in range(101)))
    made = replay(file, Replay(rate=2, skip_over_tokens=1_000))
    assert {o.prompt_tokens for o in made} == {10}
    assert len(made) / made[-1].arrival_s == pytest.approx(2, rel=0.03)


def test_coarse_stamps_are_spread_and_stay_in_order(tmp_path: Path) -> None:
    file = trace(tmp_path, *(f"{3 * (n // 10)},{n + 1},5" for n in range(100)))
    made = replay(file, Replay(spread_s=3.0))
    times = [o.arrival_s for o in made]
    assert times == sorted(times)
    assert len(set(times)) == 100
    assert all(0 <= o.arrival_s - 3 * ((o.prompt_tokens - 1) // 10) < 3 for o in made)
    assert made == replay(file, Replay(spread_s=3.0))
    assert made != replay(file, Replay(spread_s=3.0, seed=1))


def test_names_of_blocks_are_kept(tmp_path: Path) -> None:
    file = trace(tmp_path, "0,1000,5,7;8", "1,3,4,", head=HEAD + ",hash_ids")
    named, plain = replay(file)
    assert (named.prefix, named.prefix_block_tokens) == ((7, 8), 512)
    assert plain.prefix == ()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((), "empty"),
        (("0,ten,5",), "line 2: input_tokens 'ten'"),
        (("0,10,-5",), "line 2: output_tokens '-5'"),
        (("0,0,5",), "input_tokens '0'"),
        (("0,10,99999999999",), "output_tokens"),
        (("0,10",), "output_tokens None"),
        (("nan,10,5",), "arrival_s 'nan'"),
        (("-1,10,5",), "arrival_s '-1'"),
        (("0,10,5", "9,10,5", "3,10,5"), "line 4: arrives before"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: tuple[str, ...], said: str) -> None:
    with pytest.raises(WorkloadError, match=said) as caught:
        replay(trace(tmp_path, *lines))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (Replay(start_s=50), "nothing arrives from 50"),
        (Replay(start_s=-1), "start"),
        (Replay(duration_s=0), "duration"),
        (Replay(rate=0), "rate"),
        (Replay(rate=float("inf")), "rate"),
        (Replay(spread_s=-1), "spread"),
        (Replay(prefix_block_tokens=0), "blocks of 0"),
        (Replay(skip_over_tokens=5), "longer than 5"),
        (Replay(rate=1, duration_s=0.5), None),
        (Replay(rate=1, start_s=9), "at once"),
    ],
)
def test_a_wrong_wish_is_one_clear_line(
    tmp_path: Path, how: Replay, said: str | None
) -> None:
    file = trace(tmp_path, "0,10,5", "9,10,5")
    if said is None:
        assert len(replay(file, how)) == 1
        return
    with pytest.raises(WorkloadError, match=said):
        replay(file, how)


def test_what_is_no_trace_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no column output_tokens"):
        replay(trace(tmp_path, "0,1", head="arrival_s,input_tokens"))
    with pytest.raises(WorkloadError, match="cannot be read"):
        replay(tmp_path / "missing.csv")
    with pytest.raises(WorkloadError, match="cannot be read"):
        replay(tmp_path)
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(b"arrival_s," * 99)[:-9])
    with pytest.raises(WorkloadError, match="cannot be read"):
        replay(broken)
    broken.write_bytes(gzip.compress(b"")[:10] + b"\xff" * 30)
    with pytest.raises(WorkloadError, match="cannot be read"):
        replay(broken)
    with pytest.raises(WorkloadError, match="do not make 1,000 tokens"):
        replay(trace(tmp_path, "0,1000,5,7", head=HEAD + ",hash_ids"))
    with pytest.raises(WorkloadError, match="no numbers"):
        replay(trace(tmp_path, "0,10,5,a", head=HEAD + ",hash_ids"))


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_no_bytes_crash_it(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "trace.csv"
    for start in (b"", HEAD.encode() + b",hash_ids\n"):
        file.write_bytes(start + text)
        assert outcome(file)


def outcome(file: Path) -> object:
    """The arrivals, or the one line that says why there are none."""
    try:
        return replay(file)
    except WorkloadError as error:
        return "\n" not in str(error)
