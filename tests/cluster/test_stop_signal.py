"""A signal ends a run wherever it lands: in a finalizer, a log handler, a library's own ``except``.

Each case is a process of its own: its handlers and timers must not meet those of the test run.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, os, signal, sys, time
ignored = {ignored}
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # whatever the tests run under
    if signal.getsignal(number) is signal.SIG_IGN and number not in ignored:
        signal.signal(number, signal.SIG_DFL)
from glm_lora.cluster.stopping import stop_on_signal, stoppable_start
from glm_lora.errors import Interrupted
from glm_lora.report.console import SilentListener
from glm_lora.train.job import StopRequest

def asked(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
    for _ in range(100):  # bytecode between which the handler runs
        time.sleep(0.001)

class Finalized:
    def __del__(self):
        asked()

class FinalizedTwice:
    def __del__(self):
        try:
            asked()
        except BaseException:
            pass
        asked()

class Logs(logging.Handler):
    def emit(self, record):
        try:
            asked()
        except Exception:
            self.handleError(record)

def in_a_finalizer():
    Finalized()

def in_a_log_handler():
    log = logging.getLogger("somebody")
    log.addHandler(Logs())
    log.warning("told")

def in_a_library():
    try:
        asked()
    except Exception:  # as optional imports and clean-ups of libraries have it
        pass

def with_the_terminal():
    asked(signal.SIGHUP)

def interrupted():
    asked(signal.SIGINT)

def by_all_that_are_ignored():
    for number in ignored:
        asked(number)

def twice_in_a_finalizer():
    FinalizedTwice()

def waits():
    start = time.monotonic()
    while time.monotonic() < start + 20:
        time.sleep(0.01)
    print("went on")

try:
    stop = StopRequest()
    with stop_on_signal(stop, SilentListener()):
        with stoppable_start(stop, None):
            {case}()
            waits()
except Interrupted as error:
    print("ended:", error)
# What it set is the interpreter's own again.
kept = signal.SIG_IGN if signal.SIGTERM in ignored else signal.SIG_DFL
assert signal.getsignal(signal.SIGTERM) is kept
assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
assert sys.unraisablehook is sys.__unraisablehook__
"""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("in_a_finalizer", "ended: stopped while starting"),
        ("in_a_log_handler", "ended: stopped while starting"),
        ("in_a_library", "ended: stopped while starting"),
        ("with_the_terminal", "ended: stopped while starting"),
        ("interrupted", "ended: stopped while starting"),
        ("twice_in_a_finalizer", "ended: stopped at once"),
    ],
)
def test_a_signal_is_not_lost(case, said):
    program = PROGRAM.replace("{case}", case).replace("{ignored}", "()")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(said), done.stdout
    assert not done.stderr


@pytest.mark.parametrize(
    ("shell", "ignored"),
    [
        ('nohup "$@"', "(signal.SIGHUP,)"),
        ('"$@" & wait $!', "(signal.SIGINT,)"),  # what a script puts in the background
        ('trap "" INT TERM; exec "$@"', "(signal.SIGINT, signal.SIGTERM)"),
    ],
)
def test_what_is_ignored_from_the_start_stays_so(shell, ignored):
    program = PROGRAM.replace("{case}", "by_all_that_are_ignored").replace("{ignored}", ignored)
    program = program.replace("waits()\n", "print('went on')\n")
    done = subprocess.run(
        ["bash", "-c", shell, "bash", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "went on\n"
