"""Starts of replicas, each counted once."""

from prometheus_client.parser import text_string_to_metric_families

from serve_app.metrics import CONTROLLER_METRICS, Recorder
from serve_app.weights.replica_census import MAX_REMEMBERED, ReplicaCensus


class Counted:
    """A census, and what Prometheus sees of it."""

    def __init__(self) -> None:
        self._recorder = Recorder(CONTROLLER_METRICS)
        self.census = ReplicaCensus(self._recorder)

    def value(self, name: str) -> float:
        (found,) = (
            sample.value
            for family in text_string_to_metric_families(self._recorder.expose())
            for sample in family.samples
            if sample.name == name
        )
        return found

    @property
    def starts(self) -> float:
        return self.value("pitstop_replica_starts_total")


def test_a_replica_starts_once_however_often_it_reports() -> None:
    counted = Counted()
    heard = [counted.census.hear(name, is_serving=False) for name in ("a", "b", "a", "a", "b")]
    assert heard == [True, True, False, False, False]
    assert counted.starts == 2


def test_a_replica_that_serves_already_has_not_started() -> None:
    counted = Counted()
    assert not counted.census.hear("a", is_serving=True)
    assert not counted.census.hear("a", is_serving=False)
    assert counted.starts == 0


def test_who_reports_is_remembered_however_many_come_and_go() -> None:
    counted = Counted()
    for number in range(MAX_REMEMBERED + 10):
        counted.census.hear("stays", is_serving=False)
        counted.census.hear(str(number), is_serving=False)
    assert not counted.census.hear("stays", is_serving=False)
    assert counted.starts == MAX_REMEMBERED + 11
