"""Where the columns of a batch lie, without a Python object for any of them: a wide table has tens
of thousands, and to look at each takes longer than to decode it.

Source:  https://arrow.apache.org/docs/format/CDataInterface.html
"""

from __future__ import annotations

import ctypes

import numpy as np
import pyarrow as pa

from dataplane.compiled import Compiled
from dataplane.worker.columns import Ints
from dataplane.worker.kernel import kernel

_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_LENGTH, NULLS, OFFSET, VALUES = range(4)


def placed_columns(batch: pa.RecordBatch, how: Compiled | None = None) -> Ints | None:
    """Of each column: its length, its nulls (-1 where nobody counted them), how many rows of its
    values come before its own, and their address, 0 where it has none. It holds as long as the
    batch does. None where there is no compiled kernel.

    Shapes:  result: int64[columns, 4].
    """
    library = (how or kernel()).library
    if library is None:
        return None
    places = np.zeros((batch.num_columns, 4), np.int64)
    _, exported = batch.__arrow_c_array__()
    library.place_columns(_pointer_in(exported, b"arrow_array"), places.ctypes.data)
    return places


def may_have_nulls(places: Ints) -> bool:
    """Whether a column has some, as far as is known."""
    return bool(places[:, NULLS].any())
