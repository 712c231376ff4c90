"""A waiting request, as orders see it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_calrouter.ordering.order import Order

#: The ticket of who is in no heap.
NOWHERE = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One waiting request.

    Times are seconds on the engine's clock.

    Fields:
        request: vLLM's.
        number: grows with every job of an engine.
        arrived_s: when its router sent it.
        tokens: of its prompt, still to compute here.
        squares: end^2 - start^2 of that part's positions (`EngineCosts.step_s`).
        cost_s: seconds of that part, alone.
        deadline_s: until when its first token is due; infinite: no deadline.
        urgency_s: what the order sorts by.
        booked_s: its cost when it came; what it counts in its order's books.
        patient_until_s: prompt seconds that its order may serve, since it was last
            empty, before this job goes next.
        late: it can no longer be in time.
        ticket: the one of its valid heap entries (`heap.Heap`).
        home: the order that holds it; None while it is ahead of all orders (preempted).
    """

    request: Any
    number: int
    arrived_s: float
    tokens: int
    squares: int
    cost_s: float
    deadline_s: float = math.inf
    urgency_s: float = 0.0
    booked_s: float | None = None
    patient_until_s: float = 0.0
    late: bool = False
    ticket: int = NOWHERE
    home: Order | None = None

    @property
    def latest_start_s(self) -> float:
        """When it must start at the latest to be in time."""
        return self.deadline_s - self.cost_s
