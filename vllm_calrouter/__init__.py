"""Routes requests to prefill and decode engines inside vLLM's API server."""

__version__ = "0.1.0"
