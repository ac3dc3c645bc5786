"""Fixtures of the tests of the command line."""

from tests.command_line import run as run
