"""What became of each request, and of a run as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_calrouter.calibration import SloClass
    from vllm_calrouter.workloads import Arrival


class Served:
    """One request in a run; seconds of virtual time."""

    __slots__ = ("arrival", "decode_rank", "finish", "first_s", "last_s", "number",
        "preemptions", "prefill_rank", "second_s", "slo", "tokens", "ttft_target_s")

    def __init__(self, number: int, arrival: Arrival, slo: SloClass) -> None:
        self.number = number
        self.arrival = arrival
        self.slo = slo
        self.ttft_target_s = slo.ttft_s
        self.prefill_rank = self.decode_rank = None
        self.first_s = self.second_s = self.last_s = None
        self.tokens = 0
        self.preemptions = 0
        self.finish = None

    def sent_to(self, rank, prefill):
        if rank < prefill:
            self.prefill_rank = rank
        else:
            self.decode_rank = rank

    def delivered(self, tokens, now_s):
        if not tokens:
            return
        if self.first_s is None:
            self.first_s = now_s
        if self.second_s is None and self.tokens + tokens > 1:
            self.second_s = now_s
        self.tokens += tokens
        self.last_s = now_s
