"""``python -m uma_trio`` is ``uma-trio``."""

import sys


def run() -> None:
    """Run the command line.  Ctrl-C is quiet, also while it is imported."""
    try:
        from uma_trio.cli import main

        main(prog_name="uma-trio")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    from uma_trio.processes.interpreter import leave_out_current_folder

    leave_out_current_folder()
    run()
