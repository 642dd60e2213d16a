"""Who waits for whose prefix: once computed, never twice; never for a stopped leader; never for too long."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.cache.index import BlockIndex
from flowinfer.stages.cache_lookup.policy import HURRY, SharedPrefix

WAIT = 30.0


def names(text: str) -> list[bytes]:
    """Chain names: each covers all letters up to its own."""
    return [text[: i + 1].encode() for i in range(len(text))]


class World:
    """The policy with the index that it reads."""

    def __init__(self, wait_s: float = WAIT) -> None:
        self.index = BlockIndex()
        self.sharing = SharedPrefix(self.index, wait_s)

    def arrive(self, id: str, text: str, now: float = 0.0) -> bool:
        return self.sharing.arrive(id, names(text), now)

    def store(self, text: str, start: int = 0) -> list[str]:
        blocks = names(text)[start:]
        self.index.stored("prefill.0", blocks)
        return self.sharing.stored(blocks)


def test_of_many_with_one_prefix_the_first_goes_and_the_rest_wait_until_it_is_stored() -> None:
    world = World()
    assert [world.arrive(id, "abc" + id) for id in "123"] == [True, False, False]
    assert world.store("ab") == []
    assert world.store("abc", start=2) == ["2", "3"]
    assert len(world.sharing) == 0


def test_what_is_cached_or_not_shared_never_waits() -> None:
    world = World()
    world.store("ab")
    assert world.arrive("1", "abc") and world.arrive("2", "ab") and world.arrive("3", "xyz") and world.arrive("4", "")


def test_followers_wait_for_what_they_share_and_not_for_all_that_the_leader_computes() -> None:
    world = World()
    world.arrive("1", "abcdef")
    assert not world.arrive("2", "abx")
    assert world.store("ab") == ["2"]


def test_when_the_leader_is_cancelled_the_oldest_follower_leads_and_the_others_wait_for_it() -> None:
    world = World()
    for id in "123":
        world.arrive(id, "abc")
    assert world.sharing.stop(["1"]) == ["2"]
    assert world.sharing.stop(["1"]) == []
    assert world.store("abc") == ["3"]


def test_a_cancelled_follower_is_forgotten() -> None:
    world = World()
    for id in "123":
        world.arrive(id, "abc")
    assert world.sharing.stop(["2"]) == []
    assert world.sharing.stop(["1"]) == ["3"]


def test_when_leader_and_followers_stop_at_once_nobody_of_them_goes_on() -> None:
    world = World()
    for id in "1234":
        world.arrive(id, "abc")
    assert world.sharing.stop(["1", "2", "3"]) == ["4"]


def test_nobody_waits_longer_than_the_limit_and_late_ones_take_the_lead() -> None:
    world = World()
    world.arrive("1", "abc", now=0)
    world.arrive("2", "abc", now=5)
    world.arrive("3", "abc", now=6)
    assert world.sharing.expire(now=34.9) == []
    assert world.sharing.expire(now=35) == ["2"]
    assert world.sharing.stop(["1"]) == []
    assert world.sharing.stop(["2"]) == ["3"]


def test_a_new_leader_does_not_give_its_followers_new_patience() -> None:
    world = World()
    for now, id in enumerate("123"):
        world.arrive(id, "abc", now=now)
    world.sharing.stop(["1"])
    assert world.sharing.expire(now=WAIT + 2) == ["3"]


def test_a_chain_of_followers_unwinds_from_the_front() -> None:
    world = World()
    world.arrive("1", "ab")
    assert not world.arrive("2", "abcd")
    assert not world.arrive("3", "abcde")
    assert world.store("ab") == ["2"]
    assert world.store("abcd", start=2) == ["3"]


def test_a_much_shorter_prompt_does_not_queue_behind_a_huge_one_and_leads_the_next_short_ones() -> None:
    world = World()
    world.arrive("huge", "ab" + "x" * 8 * HURRY)
    assert world.arrive("short", "abc")
    assert not world.arrive("next", "abd")
    assert world.store("abc") == ["next"]


def test_when_all_is_stored_or_ended_nothing_is_remembered() -> None:
    world = World()
    for id in "12":
        world.arrive(id, "abc" + id)
    world.store("abc1")
    world.sharing.stop(["2"])
    assert world.sharing.num_led == 0 and not world.sharing._requests and not world.sharing._followers


texts = st.lists(st.integers(0, 1), max_size=14).map(lambda bits: "".join("ab"[bit] for bit in bits))
actions = st.lists(
    st.tuples(st.sampled_from(["arrive"] * 4 + ["store", "stop", "evict", "time"]), texts, st.integers(0, 40)),
    max_size=60,
)


@settings(max_examples=300)
@given(actions)
def test_every_prompt_goes_on_once_or_is_cancelled_and_none_waits_too_long(script: list[tuple[str, str, int]]) -> None:
    world, now = World(), 0.0
    arrived: dict[str, float] = {}
    waiting: set[str] = set()
    gone: set[str] = set()

    def let_go(ids: Iterable[str]) -> None:
        for id in ids:
            assert id in waiting and id not in gone
            waiting.remove(id)
            gone.add(id)

    for n, (what, text, number) in enumerate(script):
        if what == "arrive":
            arrived[str(n)] = now
            waiting.add(str(n))
            if world.arrive(str(n), text, now):
                let_go([str(n)])
        elif what == "store":
            let_go(world.store(text))
        elif what == "evict":
            world.index.removed("prefill.0", names(text)[number % 14 :])
        elif what == "stop":
            stopped = {str(number), str(number // 2)}
            waiting -= stopped
            let_go(world.sharing.stop(stopped))
        else:
            now += number
            let_go(world.sharing.expire(now))
            assert all(now < arrived[id] + WAIT for id in waiting)
        assert len(world.sharing) == len(waiting)
        assert_each_waits_for_someone_who_runs(world, waiting)
    for id in sorted(gone):
        let_go(world.sharing.stop([id]))
    let_go(world.sharing.expire(now + WAIT + 1))
    assert not waiting


def assert_each_waits_for_someone_who_runs(world: World, waiting: set[str]) -> None:
    for id in waiting:
        seen = {id}
        request = world.sharing._waiting[id]
        while request.awaited is not None:
            assert request.awaited not in world.index
            request = world.sharing._leader[request.awaited]
            assert request.id not in seen
            seen.add(request.id)


@settings(max_examples=100)
@given(st.lists(texts.filter(len), min_size=1, max_size=12))
def test_with_enough_patience_no_block_is_computed_twice(prompts: list[str]) -> None:
    world = World()
    running = [(str(i), text) for i, text in enumerate(prompts) if world.arrive(str(i), text)]
    texts_by_id = {str(i): text for i, text in enumerate(prompts)}
    computed: list[bytes] = []
    while running:
        id, text = running.pop(0)
        fresh = [name for name in names(text) if name not in world.index]
        computed += fresh
        for name in fresh:
            world.index.stored("prefill.0", [name])
            running += [(other, texts_by_id[other]) for other in world.sharing.stored([name])]
        running += [(other, texts_by_id[other]) for other in world.sharing.stop([id])]
    assert len(world.sharing) == 0
    hurried = max(map(len, prompts)) >= HURRY
    assert hurried or len(computed) == len(set(computed))
    assert set(computed) == {name for text in prompts for name in names(text)}
