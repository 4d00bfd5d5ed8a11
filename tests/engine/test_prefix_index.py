"""The names that a cache tells: newest first, all of few and landmarks of many."""

import random

from engine_runs import DEADLINE_S, prompt_of, running
from tiny_models import tiny_model

from engine import prefix_digests
from engine.prefix_index import PrefixIndex, is_landmark


def name(index: int) -> bytes:
    return index.to_bytes(16, "little")


def chain_index(length: int) -> PrefixIndex:
    index = PrefixIndex()
    for depth in range(length):
        index.add(name(depth), depth=depth)
    return index


def test_few_names_are_told_whole_newest_first() -> None:
    index = chain_index(5)
    assert index.newest(5) == [name(depth) for depth in (4, 3, 2, 1, 0)]
    index.touch([name(1), name(9), name(0)])
    assert index.newest(5) == [name(depth) for depth in (0, 1, 4, 3, 2)]
    index.discard(name(4))
    index.discard(name(9))
    assert index.newest(5) == [name(depth) for depth in (0, 1, 3, 2)]


def test_of_many_names_the_newest_landmarks_are_told() -> None:
    index = chain_index(40)
    assert index.newest(39) == [name(length - 1) for length in (32, 24, 16, 12, 8, 6, 4, 3, 2, 1)]
    assert index.newest(3) == [name(length - 1) for length in (32, 24, 16)]
    index.touch([name(2)])
    assert index.newest(2) == [name(2), name(31)]


def test_the_deepest_landmark_of_a_prefix_is_two_thirds_of_it_at_least() -> None:
    for length in range(1, 5000):
        deepest = next(depth for depth in range(length - 1, -1, -1) if is_landmark(depth))
        assert 3 * (deepest + 1) >= 2 * length


def test_a_random_walk_keeps_the_order_of_use() -> None:
    rng = random.Random(3)
    index, order = PrefixIndex(), dict[bytes, int]()
    for _ in range(3000):
        chosen, depth = name(rng.randrange(60)), rng.randrange(30)
        action = rng.choice(["add", "touch", "discard"])
        if action == "add" and chosen not in order:
            index.add(chosen, depth=depth)
            order[chosen] = depth
        elif action == "touch":
            index.touch([chosen])
            if chosen in order:
                order[chosen] = order.pop(chosen)
        elif action == "discard":
            index.discard(chosen)
            order.pop(chosen, None)
        index.check_invariants()
        assert index.newest(60) == list(reversed(order))


def test_a_manager_names_what_a_prompt_would_find_until_its_weights_change() -> None:
    with running(tiny_model(seed=1)) as manager:
        page = manager.config.page_size
        prompt = prompt_of(2 * page + 3, seed=4)
        for salt in (None, "tenant"):
            manager.add_request(prompt, max_new_tokens=1, cache_salt=salt)
            assert manager.get_result(timeout=DEADLINE_S) is not None
        found = [
            digest
            for salt in ("tenant", None)
            for digest in reversed(prefix_digests(prompt, page_size=page, version=manager.weight_version, salt=salt))
        ]
        assert len(found) == 4
        assert manager.cached_prefixes(4) == found
        assert manager.cached_prefixes(1) == found[:1]
        with manager.pause():
            """Whoever pauses may have changed the weights."""
        assert manager.cached_prefixes(4) == []
