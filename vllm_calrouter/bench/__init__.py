"""Workloads run against live servers."""
