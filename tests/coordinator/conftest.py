"""Fixtures for the tests of the state machine."""

import pytest
from machine import Machine


@pytest.fixture
def machine():
    return Machine()
