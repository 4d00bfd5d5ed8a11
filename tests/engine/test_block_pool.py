import random

import pytest

from engine.block_pool import BlockPool, block_digest, root_digest


def chain(*blocks: list[int], version: int = 1, salt: str | None = None) -> list[bytes]:
    digests, parent = [], root_digest(version, salt)
    for tokens in blocks:
        parent = block_digest(parent, tokens)
        digests.append(parent)
    return digests


def test_digests_tell_versions_salts_tokens_and_order_apart() -> None:
    a, b = [1, 2], [3, 4]
    ends = [
        chain(a, b)[-1],
        chain(b, a)[-1],
        chain(a, b, version=2)[-1],
        chain(a, b, salt="")[-1],
        chain(a, b, salt="x")[-1],
        chain([1], [2, 3, 4])[-1],
    ]
    assert len(set(ends)) == len(ends)
    assert chain(a, b) == chain(a, b)


def test_a_published_block_is_found_after_release_and_forgotten_after_eviction() -> None:
    pool = BlockPool(2)
    first, second = chain([1], [2])
    blocks = pool.acquire(2)
    pool.publish(blocks[0], first)
    pool.publish(blocks[1], second)
    pool.release(blocks)
    assert pool.lookup([first, second]) == blocks
    assert pool.num_free == 2
    pool.acquire(1)
    assert pool.lookup([first, second]) == blocks[:1], "the tail of a chain goes first"
    pool.acquire(1)
    assert pool.lookup([first]) == []
    pool.check_invariants()


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(1)
    (digest,) = chain([1])
    blocks = pool.acquire(1)
    pool.publish(blocks[0], digest)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 0
    pool.release(blocks)
    assert pool.num_free == 1


def test_releasing_more_often_than_taken_is_an_error() -> None:
    pool = BlockPool(1)
    blocks = pool.acquire(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released too often"):
        pool.release(blocks)


@pytest.mark.parametrize("seed", range(20))
def test_invariants_hold_on_a_random_walk(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(1, 12))
    held: list[list[int]] = []
    known = [chain([i])[0] for i in range(8)]
    for _ in range(400):
        action = rng.choice(["acquire", "release", "publish", "share"])
        if action == "acquire" and pool.num_free:
            held.append(pool.acquire(rng.randint(1, pool.num_free)))
        elif action == "release" and held:
            pool.release(held.pop(rng.randrange(len(held))))
        elif action == "publish" and held:
            pool.publish(rng.choice(rng.choice(held)), rng.choice(known))
        elif action == "share":
            found = pool.lookup([rng.choice(known)])
            pool.share(found)
            if found:
                held.append(found)
        pool.check_invariants()
    for blocks in held:
        pool.release(blocks)
    pool.check_invariants()
    assert pool.num_free == pool.num_blocks
