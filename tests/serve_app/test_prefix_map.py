"""Prefixes are found where replicas tell of them or were sent them, and nowhere else."""

import random

import numpy as np
import pytest

from serve_app.routing.prefix_map import SentPrefixes, ToldPrefixes, hit_tokens, pack_names, short_names


def hit_blocks(names: list[int], num_rows: int, told: ToldPrefixes, sent: SentPrefixes) -> np.ndarray:
    return hit_tokens(names, told, sent, page_size=1, step_tokens=np.ones(num_rows))


def rows_of(sent: SentPrefixes, name: int) -> int:
    newer, older = sent.known
    return newer.get(name, 0) | older.get(name, 0)


def digests(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


def test_a_name_vouches_for_all_before_it() -> None:
    told, sent = ToldPrefixes(), SentPrefixes()
    told.tell(0, pack_names(digests(1, 2)))
    told.tell(2, pack_names(digests(4)))
    sent.add(1, [1], now=0.0)
    assert hit_blocks(short_names(digests(1, 2, 3, 4, 5)), 4, told, sent).tolist() == [2, 1, 4, 0]
    assert hit_blocks([], 4, told, sent).tolist() == [0, 0, 0, 0]


def test_a_report_replaces_the_one_before() -> None:
    told = ToldPrefixes()
    told.tell(0, pack_names(digests(1, 2)))
    told.tell(1, pack_names(digests(2)))
    told.tell(0, pack_names(digests(3)))
    assert told.known == {2: 0b10, 3: 0b01}
    told.forget(1)
    assert told.known == {3: 0b01}


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 64, 512])
def test_hits_are_those_of_a_plain_search(num_rows: int) -> None:
    chooser = random.Random(num_rows)
    told, sent, known = ToldPrefixes(), SentPrefixes(), [set[int]() for _ in range(num_rows)]
    for _ in range(300):
        row, names = chooser.randrange(num_rows), chooser.sample(range(40), 5)
        told.tell_names(row, names)
        known[row] = set(names)
    for _ in range(50):
        prompt = chooser.sample(range(40), 12)
        expected = [max((depth for depth, name in enumerate(prompt, 1) if name in names), default=0) for names in known]
        assert hit_blocks(prompt, num_rows, told, sent).tolist() == expected


def test_rows_beyond_those_asked_for_are_left_out() -> None:
    told = ToldPrefixes()
    told.tell(9, pack_names(digests(1)))
    told.tell(1, pack_names(digests(1)))
    assert hit_blocks([1], 2, told, SentPrefixes()).tolist() == [0, 1]


def test_what_was_sent_is_remembered_for_a_while_and_in_bounds() -> None:
    sent = SentPrefixes(memory_s=10, max_names=100)
    sent.add(0, [1], now=0.0)
    for second in range(1, 5):
        sent.add(0, [100 + second], now=float(second))
        assert rows_of(sent, 1) == 1
    sent.add(0, [200], now=6.0)
    assert rows_of(sent, 1) == 1
    sent.add(0, [201], now=12.0)
    assert rows_of(sent, 1) == 0
    for name in range(1000):
        sent.add(0, [10_000 + name], now=12.0)
    assert sum(rows_of(sent, 10_000 + name) for name in range(1000)) <= 101
    assert rows_of(sent, 10_999) == 1


def test_what_is_coming_is_bounded_by_what_is_pending_however_long_that_goes_on() -> None:
    sent, now = SentPrefixes(max_names=1000), 0.0
    for number in range(5000):
        now += 0.01
        sent.add(number % 8, range(10 * number, 10 * number + 10), now=now, ready_at=now + 0.5)
        assert len(sent.coming) <= 2 * 10 * 51 + 1024
    assert all(sent.coming[10 * number] == 1 << (number % 8) for number in range(4960, 5000))


def test_what_is_ready_at_no_time_is_not_waited_for() -> None:
    sent = SentPrefixes(memory_s=30.0)
    sent.add(0, [1], now=0.0, ready_at=float("inf"))
    sent.add(0, [2], now=0.0, ready_at=1e12)
    sent.settle(31.0)
    assert not sent.coming


def test_what_is_computed_still_is_found_but_for_the_last_step() -> None:
    told, sent = ToldPrefixes(), SentPrefixes()
    names = list(range(1, 11))
    sent.add(0, names, now=0.0, ready_at=5.0)
    sent.add(1, names[:4], now=1.0, ready_at=2.0)
    sent.add(2, names[:1], now=1.0, ready_at=9.0)

    def hits() -> list[float]:
        return hit_tokens(names, told, sent, page_size=100, step_tokens=np.array([250.0, 50.0, 150.0])).tolist()

    assert hits() == [750, 350, 0]
    sent.settle(3.0)
    assert hits() == [750, 400, 0]
    sent.settle(6.0)
    assert hits() == [1000, 400, 0]
    sent.forget(2)
    sent.settle(10.0)
    assert not sent.coming
    assert hits() == [1000, 400, 0]


def test_a_forgotten_or_disproved_replica_is_not_hoped_for() -> None:
    sent = SentPrefixes()
    sent.add(0, [1, 2], now=0.0)
    sent.add(1, [1], now=0.0)
    sent.discard(0, [2, 7])
    assert (rows_of(sent, 1), rows_of(sent, 2)) == (0b11, 0)
    sent.forget(0)
    assert rows_of(sent, 1) == 0b10


def test_names_are_bounded_bytes_and_survive_packing() -> None:
    chain = [np.random.default_rng(1).bytes(16) for _ in range(20)]
    assert len(pack_names(chain)) == 4 * len(chain)
    told = ToldPrefixes()
    told.tell(3, pack_names(chain))
    assert hit_blocks(short_names(chain), 4, told, SentPrefixes()).tolist() == [0, 0, 0, 20]
