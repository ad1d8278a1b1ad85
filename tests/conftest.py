"""What holds for all tests, and for every process that they start."""

from __future__ import annotations

import os

# Toys are too small to be cut: with a thread per core each operation waits until every core has had its turn,
# which on a busy machine takes longer than all the rest.  Set here, since torch reads it when it is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
