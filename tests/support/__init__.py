"""What several test folders share: a fake engine in virtual time, and ways to drive the real daemon."""

import os

# numpy reads it when it is imported, and modules of this package import it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
