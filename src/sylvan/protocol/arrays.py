"""Arrays that travel in messages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
EMPTY_IDS: IntArray = np.empty(0, np.int32)
EMPTY_IDS.flags.writeable = False
