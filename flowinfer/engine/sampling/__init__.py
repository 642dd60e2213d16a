"""Choosing tokens: per-slot sampling state, log-probabilities, and the rejection sampler of draft heads."""

from flowinfer.engine.sampling.logprobs import token_logprob
from flowinfer.engine.sampling.rejection import reject
from flowinfer.engine.sampling.sampler import Sampler, seed_of

__all__ = ["Sampler", "reject", "seed_of", "token_logprob"]
