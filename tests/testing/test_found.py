"""Bugs that the simulation found, each as the schedule that it was reduced to."""

import pytest

from jaxfleet.testing.simulation import Schedule, check
from jaxfleet.testing.simulation.faults import (
    ClockJump,
    Delay,
    Fault,
    FullDisk,
    Join,
    KillServer,
    Loss,
    LossOfOne,
    Move,
    Partition,
    Reset,
    SlowPeer,
    Stop,
)
from jaxfleet.testing.simulation.run import Run
from jaxfleet.testing.simulation.schedule import UNBOUNDED
from jaxfleet.testing.simulation.workload import TRAINER_RETURN_S, Mode
from jaxfleet.transport.messages import Kind
from tests.tiers import by_default


def survives(
    mode: Mode,
    *faults: Fault,
    keeps_checkpoints: bool = True,
    seed: int = 0,
    pace_s: tuple[float, float] = (0.1, 0.1),
) -> Run:
    """Fails unless a job ends well in spite of some faults."""
    drawn = dict(enumerate(faults))
    schedule = Schedule(
        seed, mode, keeps_checkpoints=keeps_checkpoints, pace_s=pace_s, faults=drawn
    )
    assert schedule.must_succeed
    run, found = check(schedule)
    assert not found
    return run


def test_a_program_that_is_lost_on_its_way_to_a_restarted_server_is_sent_first() -> None:
    """Found by seeds 1708, 2648 and 2693: the state was sent again before the program."""
    kill = KillServer(0, 1.0, at_operation=4, loses_power=True)
    run = survives(Mode(servers=1), kill, LossOfOne(Kind.DEFINE, 1))
    assert run.servers[0].starts == 2


RESTORING = Mode(saves=True, restores=True)


@pytest.mark.parametrize("number", [17, 18])  # to either trainer, in the last step before
def test_no_state_is_restored_while_a_trainer_waits_for_values(number: int) -> None:
    """Found by seeds 8034 and 8275: its servers then had an older step, and it ended the job."""
    survives(RESTORING, LossOfOne(Kind.VALUES, number), keeps_checkpoints=False)


@pytest.mark.parametrize(
    ("mode", "number"), [(RESTORING, 5), (Mode(1, saves=True, restores=True), 2)], ids=str
)
def test_a_trainer_that_lost_an_answer_still_takes_part_in_a_restore(
    mode: Mode, number: int
) -> None:
    """Found by seed 10354: loading a checkpoint discarded the answer that it asked for again."""
    survives(mode, LossOfOne(Kind.REDUCED, number), keeps_checkpoints=False)


@pytest.mark.parametrize("at_s", [1.9, 2.2])  # while others load, and in the step after it
def test_a_connection_may_break_after_a_restore(at_s: float) -> None:
    """Found by seeds 10761 and 10905: pushes of void steps counted as lost."""
    survives(RESTORING, Reset(at_s, 1, 0), keeps_checkpoints=False)


def test_rows_pushed_before_a_restore_have_no_part_in_the_steps_after_it() -> None:
    """Found by seed 11133: the rows of a step from before completed it when it came again."""
    mode = Mode(has_table=True, saves=True, restores=True)
    survives(mode, LossOfOne(Kind.PUSH_ROWS, 12), seed=11133, pace_s=(0.126, 0.478))


@pytest.mark.grid
def test_a_push_of_rows_is_sent_again_while_its_sender_waits_for_other_servers() -> None:
    """Found by seeds 10813 and 11133: a save waited for it until `step_timeout_s`."""
    mode = Mode(has_table=True, saves=True, restores=True)
    jump, lost = ClockJump(0.341, "trainer 1", 0.972), LossOfOne(Kind.PUSH_ROWS, 15)
    survives(mode, jump, lost, keeps_checkpoints=False, seed=10813, pace_s=(0.143, 0.370))
    kills = [
        KillServer(0, 2.860, at_s=1.744, loses_power=True),
        KillServer(0, 0.669, at_s=3.377, loses_power=True),
        KillServer(0, 1.576, at_operation=11),
    ]
    lost = LossOfOne(Kind.PUSH_ROWS, 12)
    survives(mode, lost, *kills, seed=11133, pace_s=(0.126, 0.478))


@pytest.mark.grid
def test_a_push_is_sent_again_while_its_sender_waits_for_other_servers() -> None:
    """Found by seed 11195."""
    mode = Mode(1, relaxed="half_async", period=2, saves=True, restores=True)
    faults: list[Fault] = [
        Reset(2.068, 1, 0),
        LossOfOne(Kind.PUSH, 4),
        ClockJump(2.371, "trainer 0", 0.938),
        LossOfOne(Kind.PENDING, 10),
        KillServer(0, 0.240, at_operation=21, loses_power=True),
    ]
    survives(mode, *faults, seed=11195, pace_s=(0.323, 0.060))


@pytest.mark.parametrize("number", by_default(range(16, 20), 16))
def test_heartbeats_from_before_a_restore_do_not_count_as_progress_after_it(number: int) -> None:
    """A push of the step after it was forgotten, since a step of that number had been applied."""
    survives(RESTORING, LossOfOne(Kind.PUSH, number), keeps_checkpoints=False)


def test_a_restore_waits_for_space_on_a_full_disk() -> None:
    run = survives(RESTORING, FullDisk(1.5, 5.0, 0))
    assert run.took_s > 5.0  # it came within that time


@pytest.mark.parametrize("waits", by_default([False, True], True))
def test_byes_that_are_lost_for_seconds_are_said_again_while_the_server_lives(
    waits: bool,
) -> None:
    """Found by seed 5279: the trainer ended well after 2 s, and the server waited for it."""
    lost = [LossOfOne(Kind.BYE, number) for number in range(12)]
    mode = Mode(servers=1, waits=waits)
    run = survives(mode, *lost, keeps_checkpoints=False, pace_s=(0.1, 0.2))
    assert run.took_s < TRAINER_RETURN_S / 3


@pytest.mark.grid
def test_the_schedule_of_seed_5279_ends_well() -> None:
    lost = Loss(at_s=2.169236486095512, for_s=2.743681107581904, share=0.5)
    pace_s = (0.4218882510572523, 0.04341824173606507)
    mode = Mode(servers=1, waits=True)
    survives(mode, lost, keeps_checkpoints=False, seed=5279, pace_s=pace_s)


@pytest.mark.grid
def test_a_restarted_server_is_told_of_leases_that_have_just_arrived() -> None:
    """Found by seed 200058: a sample was leased again while its trainer waited for values."""
    mode = Mode(UNBOUNDED, relaxed="half_async", period=2, leases=True)
    kill = KillServer(0, 0.189, at_s=3.464, loses_power=True)
    pace_s = (0.5343655146620562, 0.46938963496522557)
    run = survives(mode, LossOfOne(Kind.VALUES, 11), kill, seed=200058, pace_s=pace_s)
    assert run.servers[0].data == {"epoch": 0, "once": 10, "twice": 0, "never": 0}


@pytest.mark.grid
@pytest.mark.parametrize("at_s", [0.4, 0.5, 0.598, 0.7])
def test_a_process_may_join_before_the_first_step_is_done(at_s: float) -> None:
    """Found by seed 200081: no step had returned the state that the process was to receive."""
    run = survives(
        Mode(changes=True),
        Join(at_s),
        seed=200081,
        pace_s=(0.18603940170494082, 0.4539859181599565),
    )
    assert all(len(record.final) > 0 for record in run.trainers)


def test_a_connection_that_is_lost_in_a_restore_costs_no_state() -> None:
    """Found by seed 9780: its server had restored an older step, which counted as lost pushes."""
    survives(
        Mode(2, has_table=True, saves=True, restores=True),
        Partition(1.8126103619145955, 0.5957869182851114, "trainer 1", "server 1", False, False),
        Reset(3.8662486069649784, 1, 0),
        Delay(1.957541800325397, 2.99921727055799, 0.2),
        keeps_checkpoints=False,
        seed=9780,
        pace_s=(0.12002140486407221, 0.47741325414180097),
    )


def test_a_connection_that_is_lost_at_the_byes_of_a_move_does_not_end_the_job() -> None:
    """Found by seed 2352: a server that had begun anew was taken for one with other trainers."""
    survives(
        Mode(saves=True, restores=True, moves=True),
        FullDisk(0.4229441739237707, 2.1588274040478788, 1),
        Reset(3.730463104298032, 1, 1),
        Move(0.27158872691071756, 1),
        Move(0.7396861061278683, 2),
        seed=2352,
        pace_s=(0.5833231903098699, 0.2717612986423231),
    )


def test_a_server_that_misses_the_bye_of_a_trainer_that_has_moved_is_told_again() -> None:
    """Found by seed 1672: the others took its refusal, once it missed that trainer, for a loss."""
    survives(
        Mode(has_table=True, saves=True, restores=True, moves=True),
        Reset(7.893121710699873, 0, 1),
        Loss(3.4256040352159456, 1.4635452292451974, 1.0),
        Stop(1.4161797878363966, 0.9274574427637513, "trainer 0"),
        Move(1.6939876794033824, 1),
        Move(2.9963557967286034, 3),
        seed=1672,
        pace_s=(0.34877331572139075, 0.56726302789297),
    )


def keeps_promises(mode: Mode, *faults: Fault, seed: int, pace_s: tuple[float, float]) -> Run:
    """Fails if a job breaks a promise; these faults may end it."""
    drawn = dict(enumerate(faults))
    run, found = check(Schedule(seed, mode, keeps_checkpoints=True, pace_s=pace_s, faults=drawn))
    assert not found
    return run


@pytest.mark.parametrize(("full_s", "is_unsaved"), [(1.0643410121393249, False), (60.0, True)])
def test_a_trainer_asks_a_server_without_space_again_before_it_ends(
    full_s: float, *, is_unsaved: bool
) -> None:
    """Found by seed 5539: it ended, and the server died without what it had pushed."""
    run = keeps_promises(
        Mode(1),
        KillServer(0, 2.3635254661397527, at_operation=27, loses_power=True),
        FullDisk(1.900949780410393, full_s, 0),
        seed=5539,
        pace_s=(0.12178089468110953, 0.5343518967237272),
    )
    assert bool(run.unsaved) == is_unsaved
    assert all(record.final for record in run.trainers)


def test_a_trainer_whose_hello_is_lost_keeps_its_samples_while_it_sends_heartbeats() -> None:
    """Found by seed 15750: a server that was started again took it for lost, and leased them."""
    run = keeps_promises(
        Mode(UNBOUNDED, relaxed="half_async", period=2, leases=True),
        FullDisk(0.2873813885876282, 1.2688928140731424, 1),
        KillServer(0, 2.5823889380433496, at_s=2.6767369101227305),
        SlowPeer(2.243200088141147, 1.1271440507004693, "server 0", 0.3),
        Loss(3.0048803431015503, 2.6871725431293774, 0.5),
        Loss(1.7530177406692333, 0.6360515718731967, 0.2),
        seed=15750,
        pace_s=(0.35238050122677544, 0.5888814164281949),
    )
    assert run.servers[0].data == {"epoch": 0, "once": 10, "twice": 0, "never": 0}
