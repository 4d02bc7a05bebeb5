"""The process that checks constraints: ``python -m uma_trio.grammar``, started by the daemon and by nobody else."""

from uma_trio.grammar.checker import main

main()
