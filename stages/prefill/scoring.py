"""Log-probabilities of prompts' own tokens, gathered while their KV is computed. Decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowinfer.engine.held import Run
from flowinfer.message import Prompt, TokenLogprob

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine

MAX_ROWS = 256  # logits at a time: of a vocabulary of 130,000 tokens they take 133 MB


class PromptScores:
    """By request, the log-probabilities of the tokens behind those that ran so far."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._found: dict[str, list[TokenLogprob]] = {}

    def run(self, run: Run, prompt: Prompt) -> None:
        """Runs a chunk of a prompt that asks for them: the logits of each of its tokens tell of the next one."""
        from flowinfer.engine.sampling import token_logprob

        num_top = prompt.sampling.prompt_logprobs or 0
        found = self._found.setdefault(prompt.id, [])
        for at in range(0, len(run.tokens), MAX_ROWS):
            part = run.tokens[at : at + MAX_ROWS]
            start = run.start + at
            logits = self._engine.run([Run(run.held, part, start)], rows="all")
            assert logits is not None, "rows were asked for"
            behind = prompt.tokens[start + 1 : start + 1 + len(part)].tolist()
            found += [token_logprob(row, token, num_top) for row, token in zip(logits.cpu(), behind, strict=True)]

    def take(self, request: str) -> list[TokenLogprob]:
        """All of a request whose prompt is computed; it is forgotten here."""
        return self._found.pop(request, [])
