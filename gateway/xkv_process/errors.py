"""The error that every command ends with, whatever it is about."""

from __future__ import annotations

import os
from typing import ClassVar


class CommandError(Exception):
    """Base of the errors that end a command with one line for people.

    `str(error)` says what happened; `advice` says what to do about it.
    """

    exit_code: ClassVar[int] = os.EX_SOFTWARE

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice
