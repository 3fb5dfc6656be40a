"""An office assistant: one model, four tasks, each task's LoRA read when a call needs it.

    python examples/office/office.py SPLIT TASK TEXT
    python examples/office/office.py SPLIT              # each task once

SPLIT is the folder that `pagein split apply` wrote. `examples/office/train.py` makes the LoRAs.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost more than they save on a busy machine

from transformers import AutoTokenizer

from pagein import load_parts

SEPARATOR = "\n###\n"
"""What `train.py` has between a question and its answer."""
EXAMPLES = {
    "summarise": "The car park will be painted at the weekend. Cars still there on Friday evening will be moved.",
    "grammar": "He have two meeting this afternoon.",
    "email": "order 7 is late, when will it come?",
    "translate": "The report is on the table.",
}


def main(arguments: list[str]) -> None:
    """Answer, and say what was loaded for it."""
    if len(arguments) not in (1, 3):
        sys.exit(__doc__)
    split, *rest = arguments
    asked = {rest[0]: rest[1]} if rest else EXAMPLES
    tokenizer = AutoTokenizer.from_pretrained(split)
    model = load_parts(split)
    for task, text in asked.items():
        ids = tokenizer(text + SEPARATOR, return_tensors="pt", add_special_tokens=False).input_ids
        output = model.generate(ids, task=task, max_new_tokens=40, do_sample=False)
        print(f"{task}: {tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)}")
    for part in model.pagein.report().parts:
        print(f"{part.part}: {part.state}, {part.bytes} bytes, loaded {part.loads} times")
    model.pagein.close()


if __name__ == "__main__":
    main(sys.argv[1:])
