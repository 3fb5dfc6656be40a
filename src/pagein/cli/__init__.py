"""The command line: one file per command, each loaded only when it is called."""


def main() -> None:
    """Run the command line; the entry point of ``pagein``."""
    from pagein.cli.app import app

    app(prog_name="pagein")
