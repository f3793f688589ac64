"""Exit codes of ``ergon dlq``."""

from __future__ import annotations

from ergon_framework.runner.exits import ExitCode


class DlqExit(ExitCode):
    """Exit codes of ``ergon dlq`` and their meanings."""

    OK = 0, "done; what somebody else had moved already counts as done"
    FAILED = 1, "some could not be moved, the one to show is not there, or the broker did not answer"
    USAGE = 2, "the command line is wrong; nothing was moved"
    CANARY = 3, "the canary failed or did not end in time; the rest was not touched"
    STOPPED = 130, "a signal came; what was not moved is still there"
