"""Other daemons, between which sessions move.

``messages`` is what they say to each other, ``settings`` who they are, ``signatures`` why they believe it, ``channel`` how
they say it over HTTP, ``copying`` how files come here, and ``moving`` the order of steps that bring a session here.  ``leaving`` offers the sessions of a daemon that stops.
Design: docs/design/cluster.md.
"""
