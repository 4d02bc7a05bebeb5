"""Other daemons, between which sessions move.

``messages`` is what they say to each other, ``settings`` who they are, ``signatures`` why they believe it, ``channel`` how
they say it over HTTP, ``copying`` how files come here, and ``moving`` the order of steps that bring a session here.
``under_way`` knows whether sessions are moving, and ``leaving`` offers the sessions of a daemon that stops.
Design: docs/design/cluster.md.
"""
