"""How ``pagein run`` prints the answer of each capability."""

from __future__ import annotations

from typing import IO, Any

from rich.table import Table
from rich.text import Text

from pagein.cli.console import printable, show
from pagein.errors import DaemonUnreachable
from pagein.protocol import Capability

_SHOWN_NUMBERS = 8
_SHADES = " ░▒▓█"


class Streamed:
    """Prints the pieces of a streamed chat or completion as they come, and one newline at the end."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._last = "\n"

    def add(self, event: Any) -> None:
        """Print what one event adds; events without text (roles, usage) add nothing."""
        for choice in event.get("choices") or []:
            text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
            if text:
                self._out.write(printable(text))
                self._out.flush()
                self._last = text[-1]

    def close(self) -> None:
        """End the last line."""
        if self._last != "\n":
            self._out.write("\n")
            self._out.flush()


def show_answer(capability: Capability, answer: Any, documents: list[str]) -> None:
    """Print an answer for people; raises DaemonUnreachable when it has not the documented shape."""
    try:
        match capability:
            case Capability.TRANSCRIPTION:
                show(Text(printable(answer["text"].strip())))
            case Capability.EMBEDDING:
                show(Text(_shortened(answer["data"][0]["embedding"])))
            case Capability.RERANK:
                rows = [(item["relevance_score"], documents[item["index"]]) for item in answer["results"]]
                show(_scores(rows))
            case Capability.CLASSIFICATION:
                show(_scores([(item["score"], item["label"]) for item in answer["data"]]))
            case Capability.TEXT_CLASSIFICATION:
                found = answer["data"][0]["scores"]
                show(_scores(sorted(((score, label) for label, score in found.items()), reverse=True)))
            case Capability.TOKEN_CLASSIFICATION:
                show(_labelled(answer["data"][0]["tokens"]))
            case Capability.SALIENCY:
                show(_heat(answer["map"]))
                show(_peak(answer["map"], answer["peak"]))
            case Capability.CHAT | Capability.COMPLETION:
                raise AssertionError("these are streamed")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise DaemonUnreachable(
            f"the answer has not the shape of {capability}: {error!r} is missing or wrong",
            hint="look at it with --json",
        ) from error


def _shortened(vector: list[float]) -> str:
    numbers = ", ".join(f"{value:.4f}" for value in vector[:_SHOWN_NUMBERS])
    rest = ", …" if len(vector) > _SHOWN_NUMBERS else ""
    length = sum(value * value for value in vector) ** 0.5
    return f"[{numbers}{rest}]  {len(vector)} dimensions, length {length:.3f} (all of it: --json)"


def _scores(rows: list[tuple[float, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True, style="cyan")
    table.add_column(overflow="fold")
    for score, words in rows:
        table.add_row(f"{score:.4f}", Text(printable(str(words))))
    return table


def _labelled(tokens: list[dict[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True, style="cyan")
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for token in tokens:
        words = (Text(printable(str(token[key]))) for key in ("label", "text"))
        table.add_row(f"{token['score']:.4f}", *words)
    return table


def _heat(grid: Any) -> Text:
    """Draw a map of what matters in the image as shades, two columns to a cell."""
    width, height, values = grid["width"], grid["height"], grid["values"]
    low, high = min(values), max(values)
    steps = (len(_SHADES) - 1) / (high - low) if high > low else 0.0
    cells = [_SHADES[round((value - low) * steps)] * 2 for value in values]
    return Text("\n".join("".join(cells[row * width : (row + 1) * width]) for row in range(height)))


def _peak(grid: Any, peak: Any) -> Text:
    low, high = min(grid["values"]), max(grid["values"])
    place = f"{100 * peak['x']:.0f} % from the left, {100 * peak['y']:.0f} % from the top"
    return Text(f"peak at {place}, score {peak['score']:.4f}; map from {low:.4f} to {high:.4f}")
