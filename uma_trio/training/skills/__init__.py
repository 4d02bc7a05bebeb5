"""One module for each family of skills; ``corpus.py`` says how much of which is trained."""
