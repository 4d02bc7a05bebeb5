"""How hypothesis searches: the same examples each time, however busy the machine; new ones on request.

And what daemons learn of this machine, or remember of their clients, stays in folders of the run's own: no test
depends on the one before, and none sees what the user has.  How they lay their memory out they do not measure, so that it
is the same whatever else the machine does.
"""

import atexit
import os
import shutil
import tempfile

from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None, max_examples=20)
settings.register_profile("explore", derandomize=False, deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("explore" if os.environ.get("UMA_TEST_EXPLORE") else "same")

for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
    os.environ[variable] = tempfile.mkdtemp(prefix="uma-trio-tests-")
    atexit.register(shutil.rmtree, os.environ[variable], ignore_errors=True)
os.environ["UMA_LAYOUT_TRIAL_S"] = "0"
