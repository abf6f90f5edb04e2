"""common/guards.py: spikes and what is none."""

from common.guards import MIN_STEPS, NUM_STEPS, SpikeGuard


def test_spikes_are_told_from_noise() -> None:
    guard = SpikeGuard(2.0)
    assert [guard.check(100.0 if step == 3 else 1.0, 1.0) for step in range(MIN_STEPS)] == [None] * MIN_STEPS
    assert guard.check(1.9, 1.9) is None
    assert guard.check(2.5, 1.0) == "loss 2.5 is 2.5 times the median of 11 steps before"
    assert guard.check(2.5, 9.0) == (
        "loss 2.5 is 2.5 times the median of 12 steps before and "
        "gradient norm 9 is 9.0 times the median of 12 steps before"
    )


def test_a_new_level_becomes_the_measure() -> None:
    guard = SpikeGuard(2.0)
    for _ in range(NUM_STEPS):
        guard.check(1.0, 1.0)
    found = [guard.check(3.0, 1.0) for _ in range(NUM_STEPS)]
    assert found[0] is not None and found[-1] is None


def test_steps_without_a_target_are_no_measure() -> None:
    guard = SpikeGuard(2.0)
    found = [guard.check(1.0 * (step % 2), 3.0 * (step % 2)) for step in range(6 * MIN_STEPS)]
    assert found == [None] * 6 * MIN_STEPS
    assert guard.check(2.5, 3.0) is not None
