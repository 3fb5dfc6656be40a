"""The reference page of the configuration, rendered from the schema."""

# ruff: noqa: E501 - a row of a Markdown table is one line

from __future__ import annotations

from pagein.config.describe import default_text, meaning, type_words, written
from pagein.config.environment import RESERVED, variable_name
from pagein.config.load import parse_settings
from pagein.config.schema import (
    DEFAULT_PARALLEL,
    DEFAULT_TIMEOUTS,
    OTHER_PARALLEL,
    Model,
    Section,
    Settings,
    section_of,
)
from pagein.errors import ConfigError


def render_reference() -> str:
    """Return the text of ``docs/reference/configuration.md``."""
    parts = [_reading(), _values()]
    parts.append("## The whole file\n\n" + _table(Settings))
    for name in Settings.model_fields:
        section = section_of((name,))
        if section is not None:
            parts.append(f"## `{name}`\n\n{section.__doc__}\n\n{_table(section)}")
    parts.append(f"## `models.NAME`\n\n{Model.__doc__}\n\n{_table(Model)}")
    parts += [_STAYING, _timeouts(), _parallel(), _environment()]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _table(section: type[Section]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        if section is Settings and field.annotation in [section_of((top,)) for top in Settings.model_fields]:
            cells = [f"[`{name}`](#{name})", "section", "", meaning(name, field, section)]
        elif name == "models":
            cells = ["[`models`](#modelsname)", "name: model", "none", meaning(name, field, section)]
        else:
            cells = [f"`{name}`", type_words(field), default_text(field), meaning(name, field, section)]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


_FAULTY = """\
budget: 6 gigs
server:
  prot: 8080
models:
  chat:
    model: chat.gguf
    contxt: 4096
    priority: hihg
"""


def _reading() -> str:
    try:
        parse_settings(_FAULTY, "pagein.yaml")
    except ConfigError as error:
        complaint = error.message
    return f"""
# Configuration

*Rendered from the schema by `python -m pagein.config.render`; CI checks that it is current.*

One YAML file (UTF-8, at most 256 KiB) configures the daemon: the one given, else the one that `$PAGEIN_CONFIG` names, else
`pagein.yaml` in the current folder. A model needs one key, `model` or `command`; everything else has a default.
[`pagein.example.yaml`](../../pagein.example.yaml) shows every key.

- An environment variable beats the file, the file beats the default.
- Relative paths start at the folder of the file (in an environment variable: at the current folder); `~` is your home.
- A section without keys (`server:`) is an empty one.
- The types are those of YAML 1.2: only `true` and `false` are truth values. Anchors work; merge keys (`<<`) and tags do not.
- Nothing is dropped silently: unknown keys and variables, keys given twice and values that make no sense are refused, all in
  one go, and `pagein` exits with code {ConfigError.exit_code}:

```text
{complaint}
```"""


def _values() -> str:
    return """
## Sizes, shares, durations

| | written as | meaning |
|---|---|---|
| size | `6GiB`, `1.5G`, `500MB`, `1048576` | `KiB MiB GiB TiB` and `K M G T` count in 1024, `KB MB GB TB` in 1000; a bare number is bytes |
| share | `85%`, `0.85` | of what the machine, or its cgroup, really has; above 0, at most 1 |
| duration | `250ms`, `30s`, `5m`, `1h30m`, `90` | units `ms s m h d`; a bare number is seconds |

A budget is a size or a share: a number with a point (`0.85`, `1.0`) is a share, one without is bytes. `budget: 6GiB` is short
for `budget: {ram: 6GiB}`. A budget below 1 MiB is refused, since it is always a forgotten unit."""


_STAYING = """
## How long a model stays

A model in use is never taken away, whatever its settings.

| `priority` | is loaded | leaves by itself | leaves for another model |
|---|---|---|---|
| `high` | when the daemon starts | never | never |
| `medium` | by the first request | never | when it is idle and no idle `low` model makes enough room |
| `low` | by a request | `scheduler.low_linger` after its last request (default: at once) | first, when it is idle |

Among idle models of one priority the one leaves that is cheapest to bring back per byte that it frees.

`pin: true` keeps a model as `high` does, from the moment it is loaded, but does not load it at start. `pagein pin` and
`pagein unpin` change it while the daemon runs. Memory that kept models hold counts as gone: a model that does not fit beside
them is refused at once, with both numbers. `pagein unload` unloads any model that is not pinned, once its requests have ended.

`keep_alive` says how long a model stays after its last request; it may still leave earlier for another model.

| `keep_alive` | `medium` | `low` | pinned |
|---|---|---|---|
| absent | stays while there is room | leaves after `scheduler.low_linger` | stays |
| `0` | leaves as soon as no request uses it or waits for it | the same | stays until it is unpinned |
| `5m` | leaves after 5 minutes without a request, or 5 minutes after a load that nobody used | the same | stays until it is unpinned |
| `-1` | stays while there is room | the same | stays |

With `0`, a model that was loaded by hand waits for its first request. With `priority: high`, `keep_alive` is refused.

A request may bring a `keep_alive` of its own: [what counts then](http.md#how-long-it-stays-then)."""


def _timeouts() -> str:
    rows = "\n".join(f"| {name} | {written(seconds, 'duration')} |" for name, seconds in DEFAULT_TIMEOUTS.items())
    return f"""
## Time-outs

`timeout` bounds the silence of a worker during a request: the time to its first byte, and between two of a stream. It does not
bound the wait for the model (`scheduler.max_wait`) nor its load (`supervisor.ready_timeout`).
[Signs of life](http.md#answers-that-take-minutes) of a worker that computes for minutes start it anew. Without it:

| capability | default |
|---|---|
{rows}"""


def _parallel() -> str:
    rows = "\n".join(f"| `{engine}` | {count} |" for engine, count in DEFAULT_PARALLEL.items())
    return f"""
## Requests at once

`parallel` is how many requests a worker holds at once; further ones wait in the model's queue. Without it:

| engine | default |
|---|---|
{rows}
| every other | {OTHER_PARALLEL} |"""


def _environment() -> str:
    reserved = ", ".join(f"`{name}`" for name in sorted(RESERVED))
    rows = [
        (variable_name(("budget",)) + "=6GiB", "`budget.ram`"),
        (variable_name(("budget", "cuda:0")) + "=85%", "`budget.cuda:0`"),
        (variable_name(("server", "port")) + "=0", "`server.port`"),
        (variable_name(("server", "api_key")) + "=…", "`server.api_key`, which then stands in no file"),
        (variable_name(("models", "chat", "context")) + "=8192", "`models.chat.context`"),
        (
            variable_name(("models", "my-model.v2", "cpus")) + "=0,1",
            "`models.my-model.v2.cpus`; a list may be `[0, 1]` too",
        ),
        (variable_name(("models", "chat", "options", "cache_ram")) + "=0", "`models.chat.options.cache_ram`"),
        (variable_name(("models", "chat", "env")) + "__OMP_NUM_THREADS=2", "`models.chat.env.OMP_NUM_THREADS`"),
    ]
    table = "\n".join(f"| `{variable}` | {key} |" for variable, key in rows)
    return f"""
## Environment variables

Every key has a variable: `PAGEIN_`, then the key with `__` between its levels. Case does not matter after the prefix (it does
in names under `env`), and other characters of a model's name become `_`. A variable changes a model of the file; it cannot
add one.

| variable | sets |
|---|---|
{table}

A variable with this prefix that names no setting is refused. These are no settings and are left alone: {reserved}."""
