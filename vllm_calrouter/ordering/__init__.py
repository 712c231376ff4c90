"""When: the order in which an engine serves what waits; one order a file."""

from vllm_calrouter.ordering.deadline import Deadline
from vllm_calrouter.ordering.job import Job
from vllm_calrouter.ordering.order import Order
from vllm_calrouter.ordering.short_first import ShortFirst
from vllm_calrouter.ordering.step import Step

__all__ = ["Deadline", "Job", "Order", "ShortFirst", "Step"]
