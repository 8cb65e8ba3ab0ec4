"""What users are told when something cannot be done.

Every message is one line: what is wrong, and how to mend it.
"""

from __future__ import annotations


class RotoscopeError(Exception):
    """Base of every error meant for a user. The command line prints it as one line and exits with 2."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


class BadInput(RotoscopeError):
    """An argument, file, text or directory that cannot be used as given."""


class Refused(RotoscopeError):
    """A model, or a part of one, that cannot be reached exactly."""


class NeverFired(RotoscopeError):
    """An intervention or observer that did not act once while it was on."""
