"""Sends each prompt to the bucket of its length. Which worker serves a bucket when is the edge's `dispatch: bucket`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import field_validator

from flowinfer.errors import RequestError
from flowinfer.message import Prompt
from flowinfer.stage import Contract, Stage, StageConfig, setting
from flowinfer.units import TokenCount


class BucketRoute(Stage):
    """Sends each prompt to the bucket of its length, so that short prompts never wait behind long ones."""

    class Config(StageConfig):
        """buckets: the most tokens of each bucket, ascending; longer prompts are refused.

        by: what is counted: all tokens of the prompt, or those that no cache holds (behind cache-lookup).
        """

        buckets: dict[str, TokenCount] = setting(
            {"short": 2_048, "medium": 16_384, "long": 65_536, "huge": 262_144}, change="live"
        )
        by: Literal["prompt_tokens", "uncached_tokens"] = "prompt_tokens"

        @field_validator("buckets")
        @classmethod
        def _check(cls, buckets: dict[str, int]) -> dict[str, int]:
            return check_buckets(buckets)

        def contract(self) -> Contract:
            """Adds bucket; needs prefix to count uncached tokens."""
            needs = {"prompts": frozenset({"prefix"})} if self.by == "uncached_tokens" else {}
            return Contract(needs=needs, adds=frozenset({"bucket"}))

    config: Config

    def open(self) -> None:
        """Sets up the bounds."""
        from flowinfer.engine.layout import BLOCK_TOKENS

        self.block_tokens = BLOCK_TOKENS
        self.reconfigure(self.config)

    def reconfigure(self, config: Config) -> None:
        """Sorts by these bounds from now on."""
        from flowinfer.stages.bucket_route.policy import BucketPolicy

        self.policy = BucketPolicy(config.buckets, config.by.replace("_", " "))

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
        """Names the bucket of each prompt, or fails it with 400 where it's longer than the last."""
        for prompt in prompts:
            try:
                prompt.bucket = self.policy.choose(self._count(prompt))
            except RequestError as error:
                self.ctx.fail(prompt.id, error)
                continue
            yield prompt

    def _count(self, prompt: Prompt) -> int:
        if self.config.by == "prompt_tokens" or prompt.prefix is None:
            return len(prompt.tokens)
        return len(prompt.tokens) - len(prompt.prefix.owners) * self.block_tokens


def check_buckets(buckets: dict[str, int]) -> dict[str, int]:
    """Raises ValueError naming the first bucket that is wrong, and why."""
    if not buckets:
        raise ValueError("at least one bucket is needed")
    previous, bound = "", 0
    for name, tokens in buckets.items():
        if not name.isidentifier():
            raise ValueError(f"bucket name {name!r} must be letters, digits and _ and not begin with a digit")
        if tokens <= bound:
            than = f"more than {previous!r} ({bound})" if previous else "at least 1 token"
            raise ValueError(f"bucket {name!r} must hold {than}, not {tokens}; list buckets from short to long")
        previous, bound = name, tokens
    return buckets
