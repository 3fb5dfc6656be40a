"""Throughput where everything fits: stock and tiered answer the same turns alternately, in one process.

`python -m kv_arms.paired MODEL USERS TURNS DOCUMENT ANSWER`: two processes would differ by more than the two ways do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import transformers

from kv_arms.say import say
from pagein.kv.trial.load import users
from pagein.kv.trial.run import open_model
from pagein.kv.trial.ways import Limits, Stock, Tiered, Way


def main() -> None:
    """Run both and say the seconds of each turn."""
    folder, *numbers = sys.argv[1:]
    count, turns, document, answer = map(int, numbers)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = open_model(Path(folder), "cpu", "auto")
    load = users(count, turns, document, 32, answer)
    limits = Limits(memory=4 * 1024**3)
    ways: dict[str, Way] = {"stock": Stock(model, limits), "tiered": Tiered(model, limits)}
    vocabulary = int(model.config.get_text_config().vocab_size)
    for way in ways.values():  # the first call chooses kernels
        way.turn(-1, load.ask(-1, 0, vocabulary)[:32], 4)
        way.finish(-1)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    unlike = 0
    said: dict[int, list[int]] = {}
    for number, (user, turn) in enumerate(load.order()):
        tokens = said.get(user, []) + load.ask(user, turn, vocabulary)
        answers = []
        for name in list(ways)[:: 1 if number % 2 else -1]:
            begin = perf_counter()
            answers.append(ways[name].turn(user, tokens, answer).tokens)
            seconds[name].append(perf_counter() - begin)
        unlike += answers[0] != answers[1]
        said[user] = answers[0]
        say("progress", done=number + 1)
    for way in ways.values():
        way.close()
    told: dict[str, Any] = {"answered": load.count * answer, "seconds": seconds, "unlike": unlike, "turns": load.count}
    say("ran", **told)


if __name__ == "__main__":
    main()
