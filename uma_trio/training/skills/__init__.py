"""One module per family of skills.  ``corpus.py`` has their shares."""
