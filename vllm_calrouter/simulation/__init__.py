"""A cluster in virtual time: vLLM's own scheduler, this package's own router."""
