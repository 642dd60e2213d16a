"""Benchmarks of parts of the service that need no service around them. `python -m flowinfer.bench` measures the engine."""
