import random

import pytest

from engine.block_pool import BlockCopy, BlockPool, CopyKind, block_digest, root_digest


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


def known(pool: BlockPool, digests: list[bytes]) -> list[bool]:
    return [pool.knows(digest) for digest in digests]


def test_a_published_block_is_found_after_release_and_forgotten_after_eviction() -> None:
    pool = BlockPool(2)
    digests = chain([1], [2])
    blocks = pool.acquire(2)
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    assert known(pool, digests) == [True, True]
    assert pool.num_free == 2
    assert pool.take(digests) == blocks
    assert pool.num_free == 0
    pool.release(blocks)
    pool.acquire(1)
    assert known(pool, digests) == [True, False], "the tail of a chain goes first"
    pool.acquire(1)
    assert known(pool, digests) == [False, False]
    assert pool.drain_copies() == []
    pool.check_invariants()


def test_an_evicted_block_sinks_to_the_host_and_comes_back_by_its_name() -> None:
    pool = BlockPool(1, num_host_slots=1)
    (digest,) = chain([1])
    blocks = pool.acquire(1)
    pool.publish(blocks[0], digest)
    pool.release(blocks)
    pool.release(pool.acquire(1))
    assert pool.knows(digest)
    assert pool.cost([digest]) == 1
    assert pool.take([digest]) == blocks
    assert pool.drain_copies() == [BlockCopy(CopyKind.TO_HOST, 0, 0), BlockCopy(CopyKind.FROM_HOST, 0, 0)]
    pool.release(blocks)
    pool.acquire(1)
    assert pool.drain_copies() == [], "the host still has it"
    assert (pool.num_evicted, pool.num_sunk, pool.num_restored) == (2, 1, 1)
    pool.check_invariants()


def test_a_full_host_tier_forgets_its_oldest() -> None:
    pool = BlockPool(3, num_host_slots=2)
    digests = [chain([i])[0] for i in range(3)]
    for block, digest in zip(pool.acquire(3), digests, strict=True):
        pool.publish(block, digest)
        pool.release([block])
    pool.acquire(3)
    assert known(pool, digests) == [False, True, True]
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
    pool = BlockPool(rng.randint(1, 12), num_host_slots=rng.choice([0, 2, 5]))
    held: list[list[int]] = []
    names = [chain([i])[0] for i in range(8)]
    for _ in range(400):
        action = rng.choice(["acquire", "release", "publish", "share", "fork"])
        if action == "acquire" and pool.num_free:
            held.append(pool.acquire(rng.randint(1, pool.num_free)))
        elif action == "release" and held:
            pool.release(held.pop(rng.randrange(len(held))))
        elif action == "publish" and held:
            name = rng.choice(names)
            pool.publish(rng.choice(rng.choice(held)), name, depth=names.index(name))
        elif action == "share":
            wanted = [name for name in rng.sample(names, 3) if pool.knows(name)]
            if wanted and pool.cost(wanted) <= pool.num_free:
                held.append(pool.take(wanted))
        elif action == "fork" and held and pool.num_free:
            held.append([pool.fork(block) for block in rng.choice(held)[:1]])
        pool.check_invariants()
        assert {name for name in names if pool.knows(name)} == set(pool.prefixes.newest(len(names)))
    for blocks in held:
        pool.release(blocks)
    pool.check_invariants()
    assert pool.num_free == pool.num_blocks
