"""``pagein shard``."""

from __future__ import annotations

from pagein.cli.making import run_making
from pagein.cli.options import Json
from pagein.cli.quantize import AllowPickle, DeleteOriginal, DryRun, ModelFolder, Out, flags


def shard(
    folder: ModelFolder,
    out: Out,
    dry_run: DryRun = False,
    delete_original: DeleteOriginal = False,
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Lay a model's weights out as one file per block, in running order, unchanged.

    For checkpoints whose layers lie across files, or that are pickles. Most need this not: they are streamed as they
    lie. Needs pagein[torch].
    """
    run_making(folder, out, flags(dry_run=dry_run, delete_original=delete_original, allow_pickle=allow_pickle), json)
