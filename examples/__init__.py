"""Runnable examples, and the tiny model and CPU cluster that the tests share."""
