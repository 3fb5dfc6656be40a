"""One way, from the start of its process to the last answer: `python -m parts_arms.serve WAY SPLIT BEGAN COUNT MEMORY`.

BEGAN is the monotonic clock when the process was started, MEMORY bytes for parts (0: all fit). With a COUNT of 0 it
answers the first request and ends.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic, perf_counter

import transformers

from kv_arms.say import say
from pagein.kv.trial.memory import Peak
from parts_arms.traffic import traffic, warm_up
from parts_arms.ways import open_way


def main() -> None:
    """Open, answer, and say what it took."""
    name, split, began, count, memory = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    peak = Peak("cpu")
    opening = monotonic()
    way = open_way(name, Path(split), int(memory) or None)
    first, *others = warm_up()
    said = [way.answer(first.task, first.prompt, first.answer)]
    answered = monotonic()
    cold = {"process": answered - float(began), "imports": opening - float(began)}
    seconds: list[float] = []
    if int(count):
        said += [way.answer(one.task, one.prompt, one.answer) for one in others]
        for number, one in enumerate(traffic(int(count))):
            begin = perf_counter()
            said.append(way.answer(one.task, one.prompt, one.answer))
            seconds.append(perf_counter() - begin)
            say("progress", done=number + 1)
    say("ran", cold=cold, seconds=seconds, said=said, told=way.told(), memory=peak.told())


if __name__ == "__main__":
    main()
