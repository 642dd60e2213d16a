"""Trains flowinfer-mini, a small DeepSeek-V4, and draft heads: each step is a module to run.

`generate` has SmolLM2 write text, `prepare` makes training data of it and of templates, `run` trains the model, `heads`
a draft head for it or for SmolLM2, `export` writes the folders that ship. Serving never imports this package.
"""
