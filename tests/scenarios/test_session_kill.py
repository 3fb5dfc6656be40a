"""A daemon that is killed under load loses no turn that was answered."""

from .kill_sessions import ROUNDS, Crash


def test_no_answered_turn_is_lost(tmp_path):
    """12 kills amid sessions, chained responses and a conversation: all answered turns are there, once, in order."""
    crash = Crash(tmp_path, seed=11)
    assert crash.run(ROUNDS) == []
    assert all(len(client.answered) >= ROUNDS / 2 for client in crash.clients)
