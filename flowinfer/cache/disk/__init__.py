"""The disk tier: KV blocks in append-only segments with a SQLite index. Knows blocks by name and never their model."""
