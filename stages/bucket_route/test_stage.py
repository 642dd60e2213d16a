"""The stage: prompts in, prompts with a bucket out, refusals by ctx.fail, settings checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from flowinfer.errors import RequestError
from flowinfer.message import PrefixHint, Prompt, Sampling
from flowinfer.stage import Port, ports
from flowinfer.stages.bucket_route.stage import BucketRoute


class Context:
    """Only what the stage uses."""

    def __init__(self) -> None:
        self.failed: dict[str, RequestError] = {}

    def fail(self, request: str, error: RequestError) -> None:
        self.failed[request] = error


def opened(**config: Any) -> BucketRoute:
    stage = BucketRoute(BucketRoute.Config(**config), Context())  # type: ignore[arg-type]
    stage.open()
    return stage


def prompt(id: str, num_tokens: int, cached_blocks: int | None = None) -> Prompt:
    prefix = None if cached_blocks is None else PrefixHint(owners=["prefill.0"] * cached_blocks)
    return Prompt(id=id, tokens=np.zeros(num_tokens, np.int32), sampling=Sampling(), prefix=prefix)


def test_each_prompt_gets_its_bucket_in_order() -> None:
    out = list(opened().step([prompt("a", 3), prompt("b", 2049), prompt("c", 20_000), prompt("d", 262_144)]))
    assert [(p.id, p.bucket) for p in out] == [("a", "short"), ("b", "medium"), ("c", "long"), ("d", "huge")]


def test_a_prompt_that_fits_no_bucket_fails_and_the_others_go_on() -> None:
    stage = opened(buckets={"only": "1k"})
    assert [p.id for p in stage.step([prompt("a", 1025), prompt("b", 1024)])] == ["b"]
    assert stage.ctx.failed["a"].status == 400  # type: ignore[attr-defined]


def test_by_uncached_tokens_a_long_prompt_in_the_cache_is_short() -> None:
    stage = opened(by="uncached_tokens")
    (out,) = stage.step([prompt("a", 64 * 100 + 10, cached_blocks=100)])
    assert out.bucket == "short"


def test_the_contract_needs_a_prefix_only_to_count_uncached_tokens() -> None:
    assert BucketRoute.Config().contract().needs == {}
    assert BucketRoute.Config(by="uncached_tokens").contract().needs == {"prompts": frozenset({"prefix"})}
    assert BucketRoute.Config().contract().adds == {"bucket"}
    assert ports(BucketRoute) == ((Port("prompts", Prompt),), (Port("prompt", Prompt),))
    assert BucketRoute.kind == "bucket-route"


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ({}, "at least one bucket"),
        ({"a": 10, "b": 10}, r"'b' must hold more than 'a' \(10\), not 10"),
        ({"a": 0}, "'a' must hold at least 1 token"),
        ({"1st": 5}, "'1st' must be letters"),
        ({"a": "lots"}, "number of tokens"),
    ],
)
def test_wrong_buckets_are_refused_by_name(buckets: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BucketRoute.Config(buckets=buckets)
