"""Short names of the numpy array types that the engine is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.integer[Any]]
"""A batch of slots. Tables and records keep 32 bits; what indexes is `np.intp`, which numpy need not convert first."""

NO_SLOTS: Slots = np.empty(0, np.intp)
"""The empty batch."""
