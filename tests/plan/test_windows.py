from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from dataplane.plan.windows import distinct

near = st.lists(st.integers(-50, 50))
far = st.lists(st.integers(-(2**61), 2**61))


@given(near | far)
def test_distinct_values_rise_and_give_the_values_back(values):
    found, number = distinct(np.array(values, np.int64))
    assert found.tolist() == sorted(set(values))
    assert found[number].tolist() == values
