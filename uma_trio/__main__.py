"""``python -m uma_trio`` is ``uma-trio``."""

from uma_trio.cli import main

main(prog_name="uma-trio")
