"""Find the columns of a batch without a Python object per column: a wide table has tens of
thousands, and inspecting each would take longer than decoding it.

Source:  https://arrow.apache.org/docs/format/CDataInterface.html
"""

from __future__ import annotations

import ctypes

import numpy as np
import pyarrow as pa

from dataplane.worker.columns import Ints
from dataplane.worker.kernel import kernel

_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_LENGTH, NULLS, OFFSET, VALUES = range(4)


def placed_columns(batch: pa.RecordBatch) -> Ints:
    """Return, for each column, its length, its null count (-1 if not counted), the offset in rows
    of its first value, and the address of its values, 0 if it has no values. The addresses are
    valid as long as the batch lives.

    Shapes:  result: int64[columns, 4].
    """
    places = np.zeros((batch.num_columns, 4), np.int64)
    _, exported = batch.__arrow_c_array__()
    kernel().place_columns(_pointer_in(exported, b"arrow_array"), places.ctypes.data)
    return places


def may_have_nulls(places: Ints) -> bool:
    """Whether a column has nulls, or may have some."""
    return bool(places[:, NULLS].any())
