"""``python -m pagein`` is the command ``pagein``."""

from pagein.cli import main

main()
