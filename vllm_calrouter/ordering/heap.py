"""A heap of jobs from which any job may leave at no cost."""

from __future__ import annotations

import heapq

from vllm_calrouter.ordering.job import Job

#: Entries of jobs that left are swept out when they outnumber the others by this.
_SLACK = 64


class Heap:
    """Jobs by key, then by number.

    An entry is valid while it carries its job's ticket: whoever gives a job another
    ticket has taken it out of every heap it was in.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, int, Job]] = []

    def push(self, key: float, job: Job) -> None:
        """Add a job under its present ticket."""
        heapq.heappush(self._entries, (key, job.number, job.ticket, job))

    def first(self) -> Job | None:
        """The job with the least key."""
        entries = self._entries
        while entries:
            _, _, ticket, job = entries[0]
            if ticket == job.ticket:
                return job
            heapq.heappop(entries)
        return None

    def sweep(self, valid: int) -> None:
        """Drop what is not valid, where that is most of it."""
        if len(self._entries) > 2 * valid + _SLACK:
            self._entries = [e for e in self._entries if e[2] == e[3].ticket]
            heapq.heapify(self._entries)
