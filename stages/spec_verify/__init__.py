"""spec-verify: accepts drafts, samples, ends sequences, drafts the next tokens."""
