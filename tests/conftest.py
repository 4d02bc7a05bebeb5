"""How hypothesis searches: the same examples each time, however busy the machine; new ones on request."""

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None, max_examples=20)
settings.register_profile("explore", derandomize=False, deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("explore" if os.environ.get("UMA_TEST_EXPLORE") else "same")
