"""Choosing tokens: per-slot sampling state, log-probabilities, and the rejection sampler of draft heads."""

from flowinfer.engine.sampling.logprobs import token_logprob
from flowinfer.engine.sampling.rejection import reject
from flowinfer.engine.sampling.sampler import Choice, Sampler, choice_of, needs_no_host, seed_of

__all__ = ["Choice", "Sampler", "choice_of", "needs_no_host", "reject", "seed_of", "token_logprob"]
