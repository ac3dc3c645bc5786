"""Children that answer lines of JSON."""

from __future__ import annotations

import subprocess
import sys

from gtco.runtime.child import Child
from tests.processes import environment

ECHO = "from gtco.runtime.child import serve; serve(lambda message: message)"


def test_each_message_has_its_answer() -> None:
    child = Child(ECHO)
    for number in range(3):
        assert child.ask({"number": number}) == {"number": number}
    child.close()
    assert child.process.returncode == 0


def test_nobody_reads_a_traceback_when_the_parent_was_killed() -> None:
    command = [sys.executable, "-c", ECHO]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment()
    ) as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        child.stdout.close()
        child.stdin.write(b"{}\n")
        child.stdin.flush()
        assert child.wait() == 1
        assert child.stderr.read() == b""
