"""Benchmarks against what users would use instead, run side by side; `pyvision bench NAME`."""
