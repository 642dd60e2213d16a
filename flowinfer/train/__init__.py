"""Trains flowinfer-mini, a small DeepSeek-V4, from scratch: `python -m flowinfer.train.prepare`, `.run`, `.export`.

Serving never imports this package.
"""
