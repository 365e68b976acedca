"""What the tests of the state machine share."""

import pytest
from machine import Machine


@pytest.fixture
def machine():
    return Machine()
