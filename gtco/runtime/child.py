"""A child process that answers one line of JSON with another, and can be killed.

Plain subprocesses instead of `multiprocessing`, which would import the user's main script again in
each child, and pickle. This module must stay light to import (no torch): compile workers use it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_ORPHAN_POLL_S = 0.5
_CHUNK = 1 << 20


class ChildDied(RuntimeError):
    """The child ended instead of answering.

    Args:
        code: its exit code; negative is the signal that killed it.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"died ({code})")
        self.code = code


class ChildHung(RuntimeError):
    """The child did not answer in time and was killed."""


class Child:
    """A Python process that runs `code`, which should end in a call of `serve`.

    It has a session of its own, so that Ctrl-C reaches the parent alone, and ends when the parent
    does, however that dies.

    Args:
        code: a Python program.
    """

    def __init__(self, code: str) -> None:
        parent = str(Path(__file__).parents[2])
        paths = [parent, os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._unread = b""

    def ask(self, message: Mapping[str, Any], deadline_s: float | None = None) -> dict[str, Any]:
        """The child's answer to `message`; whoever raises here leaves no process behind.

        Raises:
            ChildDied: it ended.
            ChildHung: `deadline_s` seconds passed.
        """
        assert self.process.stdin is not None
        until = None if deadline_s is None else time.monotonic() + deadline_s
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
            line = self._read_line(until)
        except BrokenPipeError:
            line = b""
        except TimeoutError:
            self.kill()
            raise ChildHung(f"gave no answer in {deadline_s:g} s") from None
        if not line:
            self.kill()
            raise ChildDied(self.process.returncode)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read_line(self, until: float | None) -> bytes:
        """Up to a line's end; b"" where the child closed its end.

        Raises:
            TimeoutError: `until` (of the monotonic clock) has come.
        """
        assert self.process.stdout is not None
        handle = self.process.stdout.fileno()
        poll = select.poll()  # `select.select` takes no handle above 1023
        poll.register(handle, select.POLLIN)
        while b"\n" not in self._unread:
            left = None if until is None else max(0.0, until - time.monotonic()) * 1000
            if not poll.poll(left):
                raise TimeoutError
            chunk = os.read(handle, _CHUNK)
            if not chunk:
                return b""
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def close(self) -> None:
        """Let the child end by itself: it does at the end of its input."""
        self._close_pipe(self.process.stdin)
        self.process.wait()
        self._close_pipe(self.process.stdout)

    def kill(self) -> None:
        """End the child at once, whatever it does."""
        self.process.kill()
        self._close_pipe(self.process.stdin)
        self.process.wait()
        self._close_pipe(self.process.stdout)

    @staticmethod
    def _close_pipe(pipe: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def serve(answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """A child's loop: a message a line on stdin, its answer a line on stdout."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    for line in sys.stdin:
        text = json.dumps(answer(json.loads(line))) + "\n"
        try:
            answers.write(text)
            answers.flush()
        except BrokenPipeError:  # the parent was killed: nobody is left to tell
            os._exit(1)


def _end_with(parent: int) -> None:
    """End this process when its parent has: a kernel that hangs never reads the end of input."""
    while os.getppid() == parent:
        time.sleep(_ORPHAN_POLL_S)
    os._exit(1)
