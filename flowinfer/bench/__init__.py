"""Benchmarks of parts of the service by themselves. `python -m flowinfer.bench` measures the engine."""
