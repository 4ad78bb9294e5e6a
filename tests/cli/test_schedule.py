"""The learning rate over a run: how many updates it rises, and when the run's end is a number of updates or a time."""

import dataclasses
import math

import pytest

from linattn.cli.options import TrainOptions, recorded_options
from linattn.cli.reports import Reports
from linattn.cli.schedule import Schedule

LENGTHS = [20, 187, 333, 1000, 2000, 5000]


def learning_rates(schedule: Schedule, seconds_per_step: float = 0.0) -> list[float]:
    """The factors of all updates of a run, in which each takes this time."""
    factors = []
    while len(factors) < schedule.steps and schedule.seconds < schedule.limit:
        factors.append(schedule.learning_rate_factor(len(factors)))
        schedule.seconds += seconds_per_step
    return factors


def rising(factors: list[float]) -> int:
    """The number of updates until the highest learning rate."""
    return factors.index(max(factors))


@pytest.mark.parametrize("steps", LENGTHS)
def test_by_default_the_learning_rate_rises_for_a_hundred_updates(steps):
    """But for no more than 0.3 of a short run, and for 0.05 of a long one."""
    factors = learning_rates(Schedule(steps=steps, minutes=None, warmup=TrainOptions().warmup))
    assert rising(factors) == pytest.approx(min(0.3 * steps, max(100, 0.05 * steps)), abs=1)
    assert max(factors) > 0.95 and 0 < factors[0] <= 0.2 and factors[-1] < 0.02


@pytest.mark.parametrize("steps", LENGTHS)
def test_the_clock_gives_the_same_learning_rates(steps):
    counted = learning_rates(Schedule(steps=steps, minutes=None, warmup=None))
    timed = learning_rates(Schedule(steps=10**6, minutes=(steps - 0.5) / 60, warmup=None), seconds_per_step=1.0)
    # before the first update there is no time to estimate from; later, the middle of a step is not known
    assert len(timed) == steps and rising(timed) == pytest.approx(rising(counted), abs=1)
    assert timed[1:] == pytest.approx(counted[1:], abs=0.6 / rising(counted))


def test_a_share_that_is_given_is_kept():
    """Also that of runs whose options an older version recorded, which resume with the same learning rates."""
    options = recorded_options({**dataclasses.asdict(TrainOptions()), "warmup": 0.05})
    factors = learning_rates(Schedule(steps=200, minutes=None, warmup=options.warmup))
    cosine = [(1 + math.cos(math.pi * ((step + 0.5) / 200 - 0.05) / 0.95)) / 2 for step in range(10, 200)]
    assert factors == pytest.approx([(step + 0.5) / 10 for step in range(10)] + cosine)


def test_the_time_left_of_a_run_that_is_resumed_after_its_time_is_none():
    schedule = Schedule(steps=1_000, minutes=1, warmup=None)
    reports = Reports.__new__(Reports)
    for before, seconds, left in (
        (0.0, 20.0, "00:40"),
        (30.0, 40.0, "00:20"),
        (60.0, 60.0, "00:00"),
        (60.0, 70.0, "00:00"),
    ):
        schedule.before, schedule.seconds = before, seconds
        reports.schedule, reports.first_progress = schedule, min(1.0, before / 60)
        assert reports._time_left(3) == left
